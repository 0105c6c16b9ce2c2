/* One tile of the backward on one block of keys: S, dP -> P, dS -> dV, dK, dQ. The products skip pairs that are masked,
 * and prefetch for later steps. The formulas: attn_bwd.h. */
#ifndef FA_CPU_BWD_STEP_H
#define FA_CPU_BWD_STEP_H

#include "bias.h"
#include "bwd_task.h"
#include "elementwise_bwd.h"
#include "flex_step_bwd.h"

/* grad[key] += words[key] . rows over the valid lanes, for keys [begin, end) of the block. Rows of grad and rows hold d
 * elements in `columns`. A strip of keys takes only the range of lanes that see the strip, because on the diagonal half
 * of the lanes see nothing. */
static void bwd_add_keys(bwd_task *t, const fa_bwd_tile *tile, const fa_lane_bounds *bounds, float *grad,
                         const float *words, int64_t word_stride, const float *rows, int64_t d, int64_t columns,
                         int64_t begin, int64_t end) {
    const int64_t strip = bounds ? PRODUCT_STRIP_A : end - begin, key_0 = t->block - t->keys_begin;
    for (int64_t key = begin; key < end; key += strip) {
        const int64_t stop = key + strip < end ? key + strip : end;
        int64_t lane = 0, lane_end = tile->lanes;
        if (bounds) fa_lanes_that_see(bounds, tile->lanes, key, stop, &lane, &lane_end);
        if (lane_end > tile->valid_lanes && PRODUCT_STRIP_K == 1) lane_end = tile->valid_lanes; /* AMX takes strips */
        if (lane >= lane_end) continue;
        const int64_t word = lane / WORD_ELEMS / PRODUCT_STRIP_K * PRODUCT_STRIP_K;
        const int64_t word_end = (lane_end + WORD_ELEMS - 1) / WORD_ELEMS;
        const product_args args = {.a = words + key * word_stride + word,
                                   .a_stride = word_stride,
                                   .b = rows + word * columns,
                                   .b_stride = columns,
                                   .c = grad + (key_0 + key) * columns,
                                   .c_stride = columns,
                                   .rows = stop - key,
                                   .num_words = word_end - word,
                                   .num_vecs = (int)((d + LANES - 1) / LANES),
                                   .soon = &t->soon};
        (t->stores ? product_scores : product_add)(&args);
    }
}

/* Adds the elements of dO or Q (`view`) that are not finite and were cleared, to the same gradient. */
static void bwd_add_keys_nonfinite(const bwd_task *t, const fa_bwd_tile *tile, const fa_view *view, float *grad,
                                   const float *words, int64_t word_stride, int64_t d, int64_t columns, int64_t begin,
                                   int64_t end) {
    for (int lane = 0; lane < tile->valid_lanes; lane++) {
        const int64_t first = tile->first[lane] - t->block, stop = tile->end[lane] - t->block;
        add_lane_nonfinite(grad + (t->block - t->keys_begin) * columns, columns, words, word_stride, lane,
                           first > begin ? first : begin, stop < end ? stop : end, fa_flex_of(t->p) ? t->hidden : NULL,
                           tile->lanes, bwd_query_row(t->p, &t->s, view, tile->row[lane], tile->head[lane]), d,
                           t->p->dtype);
    }
}

/* Whether some valid lane does not see every key of [begin, end) of the block, as far as there are keys. */
static bool bwd_is_masked(const bwd_task *t, const fa_bwd_tile *tile, int64_t begin, int64_t end) {
    const int64_t stop = t->block + end < t->s.len_kv ? t->block + end : t->s.len_kv;
    return tile->common_first > t->block + begin || tile->common_end < stop;
}

/* Whether there is a key behind the last one, because the number of keys is even. Its K and V are zeros. */
static bool bwd_is_odd(const bwd_task *t, int64_t end) { return t->block + end > t->s.len_kv; }

/* Whether there are lanes without a row. Without a mask their zeros times infinite keys would be NaN. */
static bool bwd_is_padded(const fa_bwd_tile *tile) { return tile->lanes > tile->valid_lanes; }

/* Flex: the lanes of a tile, for the block of keys. */
static flex_tile bwd_flex_tile(const bwd_task *t, const fa_bwd_tile *tile) {
    return flex_tile_of(t->programs, &t->s, tile->head[0], tile->row[0], tile->lanes, tile->valid_lanes, t->block,
                        t->job->layout.block_kv);
}

/* Whether all elements are finite that a product could bring to a masked pair. */
static bool bwd_is_finite(const bwd_task *t, const fa_bwd_tile *tile) {
    return tile->q_finite && tile->dout_finite && (t->k_finite || !t->p->dq.data);
}

/* Flex: finds the keys [*begin, *end) of the block and of each lane that are seen. Returns false if there are none. */
static bool bwd_flex_look(const bwd_task *t, fa_bwd_tile *tile, flex_sight *sight, fa_lane_bounds *bounds,
                          int64_t *begin, int64_t *end) {
    const flex_tile x = bwd_flex_tile(t, tile);
    if (!flex_look(&t->job->seen, &x, t->own_views, bounds, sight)) return false;
    *begin = sight->begin, *end = sight->end;
    tile->common_first = t->block + sight->common_first;
    tile->common_end = sight->has_gaps ? 0 : t->block + sight->common_end;
    for (int lane = 0; lane < tile->lanes && tile->is_idle; lane++) {
        if (tile->lse[lane] != INFINITY) continue;
        bounds->end[lane] = 0.0f; /* the row does not contribute, or it is padding */
        if (lane < tile->valid_lanes) tile->common_end = 0;
    }
    return true;
}

/* Flex: whether S and dP need programs, or bytes that mark the masked pairs. Otherwise the bounds of the lanes mask
 * enough. */
static bool bwd_runs_flex(const bwd_task *t, const fa_bwd_tile *tile, const flex_sight *sight) {
    return t->programs->score || t->programs->derivative || !bwd_is_finite(t, tile) || sight->has_gaps;
}

/* Flex: whether the step of the tile is that of a bias. Elements that are not finite need bytes of the masked pairs. */
static bool bwd_adds_bias(const bwd_task *t, const fa_bwd_tile *tile) {
    return t->job->adds_bias && bwd_is_finite(t, tile);
}

/* Flex: S and dP become P and dS, with a bias and its gradient. */
static void bwd_step_bias(const bwd_task *t, const fa_bwd_tile *tile, gradient_args *args, const uint8_t *hidden) {
    const fa_flex_bias *bias = &t->job->bias;
    const int64_t lanes = args->lanes, first = t->block + args->key, rest = t->s.len_kv - first;
    const int64_t num_keys = rest < args->num_keys ? rest : args->num_keys;
    int64_t at[FA_MAX_BLOCK_Q_BWD];
    fa_flex_lines lines = {.at = at, .stride = lanes, .num_lanes = (int)lanes, .num_lines = (int)num_keys};
    for (int64_t lane = 0; lane < lanes; lane++)
        at[lane] = fa_flex_place_of(&bias->of_value, t->s.b_idx, tile->head[lane], tile->row[lane], first);
    lines.along = bias->of_value.kv;
    bias->operations->load_bias(&lines, bias->data, bias->dtype, t->bias);
    for (int64_t i = num_keys * lanes; i < args->num_keys * lanes; i++)
        t->bias[i] = -INFINITY; /* behind the last key */
    args->scale = (float)t->p->scale;
    flex_bias_gradients(args, hidden, t->bias);
    if (bias->capture < 0 || !t->job->sums.is_wanted) return;
    for (int64_t lane = 0; lane < lanes; lane++)
        at[lane] = fa_flex_place_of(&bias->of_sum, t->s.b_idx, tile->head[lane], tile->row[lane], first);
    lines.along = bias->of_sum.kv;
    const fa_flex_sums_at to = t->places[bias->capture];
    if (to.fp64 || to.fp32) bias->operations->add_to_bias(&lines, to, t->bias);
}

/* S and dP of keys [begin, end) of the block become P and dS. i is the number of the tile. */
static void bwd_step_keys(bwd_task *t, int i, int64_t begin, int64_t end, const fa_lane_bounds *bounds, float *p_rows,
                          float *ds_rows, int64_t row_stride, bool runs_flex) {
    const bwd_job *job = t->job;
    const fa_problem *p = t->p;
    const fa_bwd_layout *l = &job->layout;
    const fa_bwd_tile *tile = &t->tiles[i];
    const int64_t lanes = tile->lanes, num_keys = end - begin, from = PRODUCT_CACHED ? 0 : begin;

    /* S^T = K Q^T, dP^T = V dO^T */
    product_args scores = {.a = t->k + begin * l->words,
                           .a_stride = l->words,
                           .b = t->q_t + i * l->tile_floats,
                           .b_stride = lanes,
                           .c = t->scores + from * lanes,
                           .c_stride = lanes,
                           .rows = num_keys,
                           .num_words = (p->d + WORD_ELEMS - 1) / WORD_ELEMS,
                           .num_vecs = (int)(lanes / LANES),
                           .soon = &t->soon};
    product_args dprob = scores;
    dprob.a = t->v + begin * l->v_words, dprob.a_stride = l->v_words, dprob.b = t->dout_t + i * l->v_tile_floats;
    dprob.c = t->dprob + from * lanes, dprob.num_words = (p->d_v + WORD_ELEMS - 1) / WORD_ELEMS;
    const bool masked = bwd_is_masked(t, tile, begin, end);
    if (masked && !PRODUCT_OVERLAPS) {
        product_scores_seen(&scores, bounds, begin, NULL);
        product_scores_seen(&dprob, bounds, begin, NULL);
    } else {
        product_scores(&scores);
        product_scores(&dprob);
    }

    /* P, dS */
    float diagonal[FA_MAX_BLOCK_Q_BWD];
    if (p->bias.data) {
        const int64_t rest = t->s.len_kv - t->block - begin;
        bias_tile(t->bias, &p->bias, t->s.b_idx, tile->row, tile->head, lanes, t->s.kv_row + t->block + begin,
                  rest < num_keys ? rest : num_keys);
        if (rest < num_keys) memset(t->bias + rest * lanes, 0, (size_t)((num_keys - rest) * lanes) * sizeof(float));
    }
    for (int lane = 0; lane < lanes && p->alibi_slopes; lane++)
        diagonal[lane] = (float)(tile->diagonal[lane] - t->block);
    gradient_args args = {.scores = scores.c,
                          .dprob = dprob.c,
                          .p_rows = p_rows,
                          .ds_rows = ds_rows,
                          .row_stride = row_stride,
                          .ds_words = t->ds_words + begin / 2 * lanes,
                          .lanes = lanes,
                          .num_keys = num_keys,
                          .key = begin,
                          .lse = tile->lse,
                          .delta = tile->delta,
                          .bytes = job->drops ? t->bytes + begin * lanes : NULL,
                          .keep_max = p->keep_max,
                          .scale = job->scale,
                          .kept = job->kept,
                          .options = {.softcap = job->softcap,
                                      .slope = p->alibi_slopes ? tile->slope : NULL,
                                      .diagonal = diagonal,
                                      .bias = p->bias.data ? t->bias : NULL,
                                      .first = bounds->first,
                                      .end = bounds->end,
                                      .masked = masked || bwd_is_padded(tile) || bwd_is_odd(t, end)}};
    if (runs_flex && bwd_adds_bias(t, tile)) {
        bwd_step_bias(t, tile, &args, masked ? t->hidden + begin * lanes : NULL);
    } else if (runs_flex) {
        const flex_tile x = bwd_flex_tile(t, tile);
        const float scale = t->programs->score ? (float)p->scale : job->scale;
        flex_gradients(&x, &args, begin, end, scale, t->hidden, !bwd_is_finite(t, tile));
        flex_store_gradients(&args);
    } else {
        gradient_step(&args);
    }
}

/* Adds the rows that the next task reads first. Long sequences, whose keys are cut into ranges, do not need these
 * prefetches. */
static void bwd_fetch_task(bwd_task *t, const fa_task *task) {
    const fa_problem *p = t->p;
    const fa_bwd_layout *l = &t->job->layout;
    const int64_t row_bytes = bwd_longest_row(p), g = p->h / p->h_kv;
    const bwd_task next = {.p = p, .s = fa_sequence_at(p, task->b_idx), .head_kv = task->head_kv};
    const int64_t num_keys = next.s.len_kv < l->block_kv ? next.s.len_kv : l->block_kv;
    const int64_t num_lanes = next.s.len_q * g < l->block_q ? next.s.len_q * g : l->block_q;
    if (l->shares > 1) return;
    for (int64_t i = 0; i < num_keys; i++) {
        const char *rows[] = {bwd_key_row(&next, &p->k, i), bwd_key_row(&next, &p->v, i)};
        fetch_later(&t->soon, rows, 2, row_bytes);
    }
    for (int64_t i = 0; i < num_lanes; i++) {
        const int64_t head = next.head_kv * g + i % g;
        const char *rows[] = {bwd_query_row(p, &next.s, &p->q, i / g, head),
                              bwd_query_row(p, &next.s, &p->dout, i / g, head),
                              bwd_query_row(p, &next.s, &p->o, i / g, head)};
        fetch_later(&t->soon, rows, t->job->finds_delta ? 3 : 2, row_bytes);
    }
}

/* Adds dK and dV of keys of the next block. A task of all ranges last touched these gradients in its previous pass.
 * With narrow rows enough of dK and dV is still in the second-level cache. */
static void bwd_fetch_gradients(bwd_task *t, int64_t begin, int64_t num_keys) {
    const fa_bwd_layout *l = &t->job->layout;
    const int64_t first = t->block + l->block_kv - t->keys_begin + begin, end = t->keys_end - t->keys_begin;
    if (l->shares > 1 || t->p->d <= 64) return;
    for (int64_t j = first; j < first + num_keys && j < end; j++) {
        const char *dk = (const char *)(t->dk + j * l->columns), *dv = (const char *)(t->dv + j * l->v_columns);
        fetch_later(&t->soon, &dk, 1, l->columns * 4);
        fetch_later(&t->soon, &dv, 1, l->v_columns * 4);
    }
}

/* Fills the prefetch queue that the products of this step drain. The queue gets this tile's share of the next block of
 * keys, and the rows of Q and dO of the tile that opens next. On the task's last step the queue also gets the first
 * rows of the next task. */
static void bwd_fetch_during(bwd_task *t, int i, int64_t num_keys) {
    const fa_bwd_layout *l = &t->job->layout;
    const int64_t row_bytes = bwd_longest_row(t->p);
    const int64_t share = (t->num_next - t->num_fetched) / (t->num_steps > 1 ? t->num_steps : 1);
    const char *rows[FA_MAX_BLOCK_Q_BWD];
    t->soon = (fetch_queue){.piece = t->pieces, .end = t->pieces, .lines = fetch_lines(row_bytes)};
    fetch_later(&t->soon, t->next_rows + t->num_fetched, share, row_bytes);
    bwd_fetch_gradients(t, t->num_fetched / 2, share / 2);
    t->num_fetched += share;
    t->num_steps--;
    int next = t->num_open;
    while (next < t->num_tiles && !bwd_sees(t->job, &t->s, &t->tiles[next], t->keys_begin, t->keys_end)) next++;
    for (int is_dout = 0; is_dout < 2 && next < t->num_tiles; is_dout++) {
        bwd_list_queries(t, is_dout ? &t->p->dout : &t->p->q, &t->tiles[next], rows);
        fetch_later(&t->soon, rows, t->tiles[next].lanes, row_bytes);
    }
    if (t->next_task && i == t->num_tiles - 1) bwd_fetch_task(t, t->next_task);
    const int64_t patches = (4 * num_keys + l->columns) / UNROLL_ROWS + 1;
    t->soon.pieces_per_patch = (t->soon.end - t->soon.piece) / patches + 1;
}

/* Whether a step without a mask is the first one of its task and its tile, and takes all keys of the task. Its sums
 * need no zeros to add to. Rows behind d of dQ^T would stay as they are. */
static bool bwd_is_first(const bwd_task *t, const fa_bwd_tile *tile, int64_t begin, int64_t end) {
    return !PRODUCT_OVERLAPS && !t->has_sums && tile->dq_range < 0 && begin == 0 && t->block + end >= t->keys_end &&
           t->p->d % 16 == 0;
}

static void bwd_step_tile(bwd_task *t, int i) {
    const bwd_job *job = t->job;
    const fa_problem *p = t->p;
    const fa_bwd_layout *l = &job->layout;
    fa_bwd_tile *tile = &t->tiles[i];
    const int64_t lanes = tile->lanes, at = i * l->tile_floats, v_at = i * l->v_tile_floats;
    int64_t begin, end;
    fa_lane_bounds bounds;
    flex_sight sight;
    if (!bwd_find_keys(job, &t->s, tile, t->block, t->block + l->block_kv, &begin, &end)) return;
    begin -= t->block, end -= t->block;
    while (t->num_open <= i) bwd_open_tile(t, t->num_open++);
    const bool sees_keys = !fa_flex_of(p) || bwd_flex_look(t, tile, &sight, &bounds, &begin, &end);
    begin = begin / 2 * 2, end = round_up(end, 2); /* rows of keys past the last key are zeros */
    const bool masked = bwd_is_masked(t, tile, begin, end);
    t->stores = sees_keys && !masked && bwd_is_first(t, tile, begin, end);
    if (p->dq.data) bwd_enter_range(t, i);
    if (!sees_keys) return;
    if (t->stores)
        t->has_sums = true;
    else
        bwd_start_sums(t);
    bwd_fetch_during(t, i, end - begin);
    if (!fa_flex_of(p) && (masked || bwd_is_padded(tile) || bwd_is_odd(t, end)))
        fa_bound_lanes(&bounds, tile->first, tile->end, lanes, t->block, l->block_kv);

    /* Rows of P and dS are half as long for bf16. If the scores of a strip stay in the first-level cache, the rows lie
     * behind these scores. Otherwise they lie over the scores. */
    const int64_t cached = PRODUCT_CACHED ? PRODUCT_CACHED : l->block_kv;
    const int64_t row_stride = PRODUCT_CACHED ? lanes / WORD_ELEMS : lanes;
    float *p_rows = t->scores + PRODUCT_CACHED * lanes, *ds_rows = t->dprob + PRODUCT_CACHED * lanes;
    if (job->drops)
        dropout_bytes(t->bytes, lanes, begin, end, p->seed,
                      fa_dropout_stream(p->offset, t->s.b_idx, p->h, tile->head[0]), tile->row[0], t->block);
    const bool runs_flex = fa_flex_of(p) && bwd_runs_flex(t, tile, &sight);
    if (runs_flex && (masked || !bwd_adds_bias(t, tile))) {
        const flex_tile x = bwd_flex_tile(t, tile);
        flex_hide(&x, &sight, &bounds, begin, end, t->hidden);
    }
    for (int64_t key = begin, stop; key < end; key = stop) {
        stop = key + cached < end ? key + cached : end;
        bwd_step_keys(t, i, key, stop, &bounds, p_rows + key * row_stride, ds_rows + key * row_stride, row_stride,
                      runs_flex);
    }

    /* dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T */
    const fa_lane_bounds *seen = masked ? &bounds : NULL;
    const int64_t columns = l->columns, v_columns = l->v_columns;
    if (p->dv.data)
        bwd_add_keys(t, tile, seen, t->dv, p_rows, row_stride, t->dout + v_at, p->d_v, v_columns, begin, end);
    if (p->dk.data) bwd_add_keys(t, tile, seen, t->dk, ds_rows, row_stride, t->q + at, p->d, columns, begin, end);
    if (p->dv.data && !tile->dout_finite)
        bwd_add_keys_nonfinite(t, tile, &p->dout, t->dv, p_rows, row_stride, p->d_v, v_columns, begin, end);
    if (p->dk.data && !tile->q_finite)
        bwd_add_keys_nonfinite(t, tile, &p->q, t->dk, ds_rows, row_stride, p->d, columns, begin, end);
    if (!p->dq.data) return;
    const float *ds_words = WORD_ELEMS == 2 ? t->ds_words : ds_rows;
    const product_args dq = {.a = t->k_t + begin / WORD_ELEMS,
                             .a_stride = l->k_t_stride,
                             .b = ds_words + begin / WORD_ELEMS * lanes,
                             .b_stride = lanes,
                             .c = tile->dq_t,
                             .c_stride = lanes,
                             .rows = round_up(p->d, PRODUCT_ROWS), /* padding rows of K^T are zero */
                             .num_words = (end - begin) / WORD_ELEMS,
                             .num_vecs = (int)(lanes / LANES),
                             .soon = &t->soon};
    if (masked && !PRODUCT_OVERLAPS)
        product_keys_seen(product_add, &dq, &bounds, begin);
    else
        (t->stores ? product_scores : product_add)(&dq);
    for (int64_t key = begin; key < end && !t->k_finite; key++)
        if (t->key_rows[key])
            add_key_nonfinite(dq.c, ds_words, lanes, key, tile->first, tile->end, t->block,
                              fa_flex_of(p) ? t->hidden : NULL, t->key_rows[key], p->d, p->dtype);
}

#endif
