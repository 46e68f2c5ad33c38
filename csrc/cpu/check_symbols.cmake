# Fails if an object of isa.cc exports a function of another namespace than its instruction set's: a global (T), weak (W,
# V), unique (u) or indirect (i) symbol. Such a function could take the place of its namesake in code that runs on
# processors without the instruction set.
execute_process(
  COMMAND "${NM}" --defined-only --extern-only "${OBJECT}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(LENGTH "${ISA}" length)
string(REGEX MATCHALL "[^\n]* [TWVui] [^\n]*" functions "${symbols}")
list(FILTER functions EXCLUDE REGEX "9jax_flash3cpu${length}${ISA}")
if(functions)
  message(FATAL_ERROR "${OBJECT} exports functions that code for other processors may call: ${functions}")
endif()
