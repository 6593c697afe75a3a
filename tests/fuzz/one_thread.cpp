// SPDX-License-Identifier: Apache-2.0
//
// What the readers call of the kernel library, so that the fuzzers are built without it.
#include "quantfuse/quantfuse.h"

int32_t qf_get_num_threads(void) { return 1; }
qf_status qf_set_num_threads(int32_t) { return QF_OK; }
