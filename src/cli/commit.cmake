# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCE=DIR -DHEADER=FILE -P commit.cmake: writes the commit of DIR into FILE, and leaves FILE alone where it
# already says so, because touching it costs a relink.
set(commit "")
find_program(git git)
if(git)
  execute_process(COMMAND "${git}" -C "${SOURCE}" describe --always --dirty --tags
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(commit STREQUAL "")
  set(commit "unknown")
endif()
set(text "#define QUANTFUSE_COMMIT \"${commit}\"\n")
set(previous "")
if(EXISTS "${HEADER}")
  file(READ "${HEADER}" previous)
endif()
if(NOT text STREQUAL previous)
  file(WRITE "${HEADER}" "${text}")
endif()
