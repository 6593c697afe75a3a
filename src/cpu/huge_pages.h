// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace quantfuse {

// Asks the system to hold [data, data + bytes) in pages of 2 MB, as far as whole ones lie in it. What is
// there is kept. A CPU looks ahead in memory only to the end of a page, and a page of 4 KB is a row of a
// weight: to read all of it is up to a third faster from large ones. Where the system refuses, nothing
// changes.
void use_huge_pages(void* data, size_t bytes);

}  // namespace quantfuse
