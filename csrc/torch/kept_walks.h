/* Where the walks of a block mask lie that stays as it is from call to call (fa_kept_walks of flex/flex.h).
 *
 * create_block_mask gives its block mask a list: two entries, for forward and backward, and the most bytes that one may
 * take. The first call on a GPU makes an entry. The entry serves the next calls of the same sizes, stream and mask. A
 * change of the lists of blocks or of the mask's tensors that PyTorch has counted ends this. The lists of a window, or
 * of packed sequences, that a call with options keeps have such a list, too (flash_attn/_extended_directly.py). */
#ifndef FA_TORCH_KEPT_WALKS_H
#define FA_TORCH_KEPT_WALKS_H

#include "python_api.h" /* CPython wants to be the first */

#include "flex/flex.h"

typedef struct {
    fa_kept_walks walks;
    fa_pass pass;
    PyObject *list, *lists, *of_mask;           /* the two entries; the lists of blocks; the mask's tensors, or None */
    PyObject *entry;                            /* the one of this pass, or NULL */
    int64_t versions[4 + FA_FLEX_MAX_CAPTURES]; /* how often the tensors were changed */
    size_t num_versions;
} fa_kept_of_call;

/* blocks: two sizes, four lists of blocks, and the list of entries. mask: None or (program, tensors, numbers). Returns
 * what the problem gets, or NULL: PyTorch does not count the changes of a tensor. */
fa_kept_walks *fa_offer_kept_walks(fa_kept_of_call *call, PyObject *blocks, PyObject *mask, fa_pass pass);

/* Behind the call: makes the entry, if the call has made walks and went well, and lets go of the rest. */
void fa_settle_kept_walks(fa_kept_of_call *call, fa_status status);

#endif
