// Loaded before the C library (LD_PRELOAD): injects faults of the system that environment variables select.
//
//   FAULT_LISTING=folder  the listing of that folder fails after its first entry
//   FAULT_LINK=file       whoever makes a file finds a link to that one where it is to be
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct dirent* (*Listing)(DIR*);

static struct dirent* list(const char* name, DIR* folder) {
  static int listed = 0;
  const char* failing = getenv("FAULT_LISTING");
  if (failing) {
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", dirfd(folder));
    if (readlink(link, path, sizeof(path) - 1) > 0 && strcmp(path, failing) == 0 && listed++ > 0) {
      errno = EIO;
      return NULL;
    }
  }
  return ((Listing)dlsym(RTLD_NEXT, name))(folder);
}
struct dirent* readdir(DIR* folder) { return list("readdir", folder); }
struct dirent64* readdir64(DIR* folder) { return (struct dirent64*)list("readdir64", folder); }

typedef int (*Open)(int, const char*, int, ...);

static int open_in(const char* name, int folder, const char* path, int flags, int mode) {
  const char* target = getenv("FAULT_LINK");
  if (target && (flags & O_CREAT)) (void)!symlinkat(target, folder, path);
  return ((Open)dlsym(RTLD_NEXT, name))(folder, path, flags, mode);
}
#define DEFINE_OPEN(name)                                     \
  int name(int folder, const char* path, int flags, ...) {    \
    va_list more;                                             \
    va_start(more, flags);                                    \
    const int mode = flags & O_CREAT ? va_arg(more, int) : 0; \
    va_end(more);                                             \
    return open_in(#name, folder, path, flags, mode);         \
  }
DEFINE_OPEN(openat)
DEFINE_OPEN(openat64)
