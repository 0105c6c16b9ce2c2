/* Keys of a KV cache, in attn_fwd_sm80. They lie in pages, or in rows of a cache from some row on.
 *
 * Thread i of a CTA finds the place of key i of each key tile, and gives it to all threads through shared memory. The
 * threads that load K or V read the place of a row there, which takes one instruction. A page number comes from memory,
 * so it is asked for one step before it becomes a place, and this happens one step before K is loaded. No step waits
 * for a page number longer than for its tiles, and no register keeps anything from step to step:
 *
 *   step i    barrier | ask for the pages of tile i+3 | load K of tile i+1, V of tile i-1, i or i+1 | S of tile i |
 *             places of tile i+2 | ..
 *
 * So the places of four tiles are kept, and of eight where V of tile i-1 is loaded. */
#ifndef FA_ATTN_FWD_SM80_CACHE_CUH
#define FA_ATTN_FWD_SM80_CACHE_CUH

#include "attn_fwd_sm80_tiles.cuh"
#include "division.cuh"

static_assert(BLOCK_KV <= THREADS, "each key of a tile has a thread");

/* Fills the ring of places. Tiles count from the last one down. */
struct place_finder {
    const fa_cuda_problem &p;
    const sequence &s;
    int first; /* key of tile 0 */
    shared_memory &shared;

    /* The thread's key, counted as rows of the cache. */
    DEVICE int row_of(int tile) const { return s.kv_row + first - tile * BLOCK_KV + (int)threadIdx.x; }

    /* Asks for the page of the thread's key. Only threads of a key call this function and the next. A key that does not
     * exist has some page, from which nothing is loaded. */
    DEVICE void ask(int tile) const {
        u32 *to = shared.places_of(tile) + threadIdx.x;
        const int row = row_of(tile);
        if (p.paged && row < s.kv_row + s.len_kv)
            cp_async<4>(smem_address(to), s.pages + divide(row, p.by_page_size), true);
        else
            *to = p.paged ? 0 : s.kv_batch;
    }
    /* Stores where the key lies in a head, in pieces of 16 bytes. A number that no page has counts as the last page's.
     */
    DEVICE void put(int tile) const {
        u32 *place = shared.places_of(tile) + threadIdx.x;
        const int row = row_of(tile), in_page = p.paged ? row - divide(row, p.by_page_size) * p.page_size : row;
        const u32 number = p.paged ? min(*place, (u32)p.num_pages - 1) : *place;
        *place = number * (u32)(p.k.stride_b / 8) + in_page * (u32)(p.k.stride_row / 8);
    }
};

/* Loads the key tiles of K or V, whose places are known. NOTE: the compiler moves no load of a place above a cp.async.
 * So places are read before the cp.async that comes before their own. */
struct cached_key_loader : tile_loader<BLOCK_KV> {
    const u32 *places; /* of the thread's first row */
    u32 next = 0;      /* the place of the next piece */

    DEVICE cached_key_loader(const fa_cuda_view &kv, int head_kv, const u32 *places)
        : tile_loader((const factor *)kv.data + head_kv * kv.stride_h, 0), places(places + top()) {}

    DEVICE u32 place_of(int i, int tile) const { return places[(u32)tile % PLACE_TILES * BLOCK_KV + i * STEP]; }
    DEVICE void load(u32 to, long long, int num_own, int tile) {
        u32 from_places[NUM];
#pragma unroll
        for (int i = 0; i < NUM; i++) from_places[i] = place_of(i, tile);
        if (LANES == PIECES || left() < HEAD_DIM)
#pragma unroll
            for (int i = 0; i < NUM; i++)
                cp_async_16(to + i * STEP * PITCH * BYTES, from + (u64)from_places[i] * 8, i * STEP < num_own);
    }
    /* Before the pieces of a tile. */
    DEVICE void begin(int tile) { next = place_of(0, tile); }
    DEVICE void load_piece(int i, u32 to, long long, int num_own, bool exists, int tile) {
        cp_async_16_if((LANES == PIECES || left() < HEAD_DIM) && exists, to + i * STEP * PITCH * BYTES,
                       from + (u64)next * 8, num_own > NONE + (1 << 29));
        if (i + 1 < NUM) next = place_of(i + 1, tile);
    }
};

#endif
