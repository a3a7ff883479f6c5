// SPDX-License-Identifier: Apache-2.0
// Coded rows (see row_codec.h) that a copy engine brings into the pages themselves, where they become
// elements in place: no multiprocessor is needed until all have come.
//
// Of a run of tokens that follow each other in the pages, the codes come to the end of its bytes and are
// expanded from its first token on. With n tokens of P bytes, of C <= P when coded, those of token i lie from
// n (P - C) + i C on, and are not overwritten before token i itself is: token j < i ends at
// (j + 1) P <= i P <= n (P - C) + i C, since i (P - C) <= n (P - C).
#pragma once

#include <vector>

#include "transfer.h"

namespace kvcache {

// At most so many bytes of codes are read before what they become is written: of one token at least.
constexpr int64_t kWindowBytes = 48 << 10;

// Whether coded rows may come into these pages: a token's rows fill all bytes from it to the next.
bool expands_in_place(const Pages& pages);

// Tokens that follow each other in the pages.
struct CodeRun {
    size_t chunk;                                     // index of its chunk in the batch
    int64_t token, tokens;                            // the first one from the chunk's first on, and how many
    int64_t page_offset;                              // bytes of the first one from a layer's first base on
    int64_t codes_offset(const Pages& pages) const {  // bytes from page_offset on to the codes
        return tokens * (pages.layout.token_stride - pages.chunk_token_bytes());
    }
};

// The runs of a checked batch of pages that expand in place, in its order. Throws std::invalid_argument where
// two share a token, since one would overwrite the other's codes.
std::vector<CodeRun> code_runs(const Pages& pages, const Batch& batch);

// Expands all layers of a batch whose codes were copied (see boxes.h): a kernel on `stream`, or its host
// twin. The chunks' addresses are not read.
void cuda_expand(const Pages& pages, const Batch& batch, uint64_t stream);
void host_expand(const Pages& pages, const Batch& batch);

}  // namespace kvcache
