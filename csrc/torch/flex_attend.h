/* Attention with mods, for Python. The caller has made the results.
 *
 *   q, dq [b, h, len_q, d]    k, dk [b, h_kv, len_kv, d]    v, dv [.., d_v]    out, dout [b, h, len_q, d_v]
 *   lse, max_scores, dlse, softmax_d [b, h, len_q], fp32
 *
 * scale None is 1 / sqrt(d). plain is (window_left, window_right, softcap) of a call without mods; (-1, -1, 0.0) with
 * mods.
 * score, mask and derivative are None or (program, tensors, numbers). blocks is None or (block_q, block_kv, the number
 * and the places of partial blocks, the same of full blocks), where the lists of full blocks may be None. gradients
 * holds None or a tensor for each of the derivative's tensors. Tensors that are not wanted are None.
 *
 * sequences is None or (q_offset, kv_len, block_table, whether the rows of the block mask count from q_offset), where
 * tensors may be None. With a block table k and v are [num_pages, h_kv, page_size, d].
 *
 * sinks of a forward is None or (sinks, shift, cu_seqlens_q, probability), each of which but sinks may be None. The
 * shift was subtracted from the scores, rows behind the last of cu_seqlens_q have no sink, and probability [b, h, rows]
 * is written, on the CPU. */
#ifndef FA_TORCH_FLEX_ATTEND_H
#define FA_TORCH_FLEX_ATTEND_H

#include "python_api.h" /* CPython wants to be the first */

#include "call.h"
#include "outputs.h"

/* Executes a forward of the plain ops (direct.h), whose window, softcap, slopes and places of packed sequences mods
 * compute (option_mods.h). With packed sequences the mods see one batch, whose rows and keys are those of the tensors.
 * further:
 *
 *   kind_of, attn_bias, attn_mask, sinks, places, blocks
 *   wants_max           the largest score of each head, a result [h]
 *   on_cpu, least, given_shift, record
 *   wants_probability   that of sinks, which the CPU returns behind lse
 *   dropout             None, or dropout_p, in place of the op's, and a function that draws rng_state. It is called
 *                       once nothing refuses the call. */
fa_status fa_flex_execute(const fa_call *call, PyObject *const *further, fa_outputs *outputs, fa_error *err);

PyObject *fa_flex_forward(PyObject *self, PyObject *args);

/* Makes the results, too. It takes a BlockMask in place of blocks, which must have the lengths of the call. plain is
 * None with mods; else the block mask is checked and left out, because its mask_mod is the window. Returns (out, lse
 * or None, max_scores or None, blocks or None). None: something does not fit or watches ops, and nothing has happened.
 * The caller goes the long way then, which says what it was. */
PyObject *fa_flex_direct(PyObject *self, PyObject *args);
PyObject *fa_flex_backward(PyObject *self, PyObject *args);

#endif
