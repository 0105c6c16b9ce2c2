/* Names of the schedules in tiles.def, and what follows from a table row in both attn_fwd_sm90.cu and
 * attn_fwd_fp8_sm90.cu. */
#ifndef FA_ATTN_FWD_SCHEDULE_CUH
#define FA_ATTN_FWD_SCHEDULE_CUH

#include "attn_fwd_params.h"
#include "element.cuh"

#ifndef SINGLE_KEYS
#define SINGLE_KEYS 0 /* of a kernel that loads K and V by TMA */
#endif
#ifndef WHOLE_KEYS
#define WHOLE_KEYS 0 /* of a kernel whose boxes of K and V have one chunk of columns */
#endif
#ifndef FLEX
#define FLEX 0 /* of a kernel that does not know a user's functions */
#endif
#if FLEX
#include "flex.cuh"
typedef with_mods<fa_attn_fwd_params> params;
#else
typedef fa_attn_fwd_params params;
#endif

/* TURN: how long a warpgroup keeps its turn to issue products. */
enum { TURN_NEVER = 0, TURN_WHILE_ISSUING = 1, TURN_UNTIL_SCORES = 2 };
/* O_WAIT: when a step waits for P V, in relation to its exponentials. AMID lies between the two rows of a thread.
 * BEFORE also means that P V is issued before S. */
enum { O_WAIT_AFTER_EXP = 0, O_WAIT_AMID_EXP = 1, O_WAIT_BEFORE_EXP = 2 };

constexpr int BLOCK_Q = 64 * WGS;
constexpr int THREADS = FA_FWD_THREADS(WGS, CTAS);
/* Consumers take registers from the warpgroup that feeds them, which is the first one. Otherwise the warps that feed
 * are the last ones. */
constexpr bool MOVES_REGISTERS = !FA_FWD_FEW_REGISTERS(WGS, CTAS);
constexpr int FEEDING_GROUP = MOVES_REGISTERS ? 0 : WGS, FIRST_CONSUMER = MOVES_REGISTERS ? 1 : 0;
/* The length of a row of a swizzled chunk of Q, K and V: 64 bytes where these fill whole chunks and 128 do not. But
 * tiles of 192 rows and more than 64 columns are for heads whose rows TMA loads slowly in pieces of 64 bytes. The host
 * has the same rule for boxes (fa_fwd_sm90_box). */
constexpr bool fills_chunks(int row_bytes) {
    return D_QK * element::BYTES % row_bytes == 0 && D_V * element::BYTES % row_bytes == 0;
}
constexpr bool IS_FOR_SLOW_ROWS = element::BYTES == 2 && WGS > 2 && D_QK > 64;
constexpr int ROW_BYTES = !fills_chunks(128) && fills_chunks(64) && !IS_FOR_SLOW_ROWS ? 64 : 128;
constexpr int CHUNK = ROW_BYTES / element::BYTES;
/* Columns in shared memory. Products pass over those behind D_QK and D_V, and TMA drops those of O. */
constexpr int CHUNKS_QK = (D_QK + CHUNK - 1) / CHUNK, CHUNKS_V = (D_V + CHUNK - 1) / CHUNK;
constexpr int STORED_QK = CHUNKS_QK * CHUNK, STORED_V = CHUNKS_V * CHUNK;
/* Where K and V lie in a pipeline stage. Chunks follow each other, and each has all keys. A box of WHOLE_KEYS has all
 * chunks of its keys: groups of 8 keys follow each other, and each has all chunks. */
constexpr int CHUNK_BYTES = (WHOLE_KEYS ? 8 : BLOCK_KV) * ROW_BYTES;         /* from chunk to chunk */
constexpr int GROUP_BYTES_QK = 8 * ROW_BYTES * (WHOLE_KEYS ? CHUNKS_QK : 1); /* from 8 keys to the next 8 */
constexpr int GROUP_BYTES_V = 8 * ROW_BYTES * (WHOLE_KEYS ? CHUNKS_V : 1);
/* The place of a key's columns of a chunk of V, in elements. */
DEVICE constexpr int place_in_v(int key, int chunk) {
    return (WHOLE_KEYS ? key / 8 * CHUNKS_V * 8 + chunk * 8 + key % 8 : chunk * BLOCK_KV + key) * CHUNK;
}
constexpr bool O_BY_TMA = D_V <= 128;
constexpr bool LONGEST_FIRST = CAUSAL || LOCAL || FLEX;
constexpr bool PV_FIRST = O_WAIT == O_WAIT_BEFORE_EXP;
constexpr bool SPLITS_SOFTMAX = O_WAIT == O_WAIT_AMID_EXP;
/* Q of the next work tile is loaded before the last V of this one. */
constexpr bool Q_EARLY = WGS < 3 && Q_STAGES > 1;
/* Q has one place. The place of the first K is free before it, so K is loaded first. */
constexpr bool K_FIRST = Q_STAGES == 1;
/* Two warps copy single keys of K, and two of V. Each of their lanes arrives for its own copies. */
constexpr u32 COPYING_LANES = 2 * 32;
/* Arrivals at the mbarrier of a full stage of K. A thread that loads by TMA arrives once. */
constexpr u32 K_ARRIVALS = SINGLE_KEYS ? COPYING_LANES : 1;
/* Consumers may be two work tiles behind the scheduler, so two more slots are needed. */
constexpr int TILE_SLOTS = Q_STAGES + 2;
/* Each consumer warp notes this many failed work tiles until the scheduler reads them. Fewer tiles are on their way. */
constexpr int FAILED = 8;
/* A key is large if its P exceeds this share of what a thread has summed. */
constexpr float LARGE_SHARE = 0.4f;

static_assert(TURN_NEVER <= TURN && TURN <= TURN_UNTIL_SCORES, "TURN has three values");
static_assert(O_WAIT_AFTER_EXP <= O_WAIT && O_WAIT <= O_WAIT_BEFORE_EXP, "O_WAIT has three values");
static_assert(D_QK * element::BYTES % 32 == 0 && D_V % 16 == 0, "wgmma contracts 32 bytes; stmatrix stores 16 columns");
static_assert(BLOCK_KV * element::BYTES % 32 == 0, "wgmma contracts 32 bytes at a time");
static_assert(Q_STAGES <= 2, "the tile before lies in the other place");
static_assert(BLOCK_KV <= 256, "a TMA box has at most 256 rows");
static_assert(!WHOLE_KEYS || (STORED_QK == D_QK && STORED_V == D_V && ROW_BYTES == 128 && !SINGLE_KEYS),
              "TMA fills no columns of a box with whole keys");

#endif
