// Two warps with no barrier between the store of one and the load of the other.
#include "record.h"

namespace {

void put() { record::access(record::Instruction::store, 4 * (record::thread() % 32), 4, RECORD_SITE); }
void get() { record::access(record::Instruction::load, 4 * (record::thread() % 32), 4, RECORD_SITE); }

void run(int) {
  if (record::thread() < 32) put();
  record::barrier();
  if (record::thread() < 32) get();
  if (record::thread() >= 32) put();
}

const record::Region regions[] = {{"tile", 0, 128}};
const bool added = record::add({"known", 0, 0, 64, regions, 1, run});

}  // namespace
