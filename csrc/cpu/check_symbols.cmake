# Fails if an object of isa.cc exports a function: a global (T), weak (W, V), unique (u) or indirect (i) symbol. Such a
# function could take the place of its namesake in code that runs on processors without the instruction set.
execute_process(
  COMMAND "${NM}" --defined-only --extern-only "${OBJECT}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
if(symbols MATCHES "[^\n]* [TWVui] [^\n]*")
  message(FATAL_ERROR "${OBJECT} has a function that is not local: ${CMAKE_MATCH_0}")
endif()
