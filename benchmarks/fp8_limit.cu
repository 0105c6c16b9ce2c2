/* How much products in 8 bits and exponentials slow each other on Hopper: the limit of csrc/cuda/attn_fwd_fp8_sm90.cu.
 *
 *   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a --use_fast_math -Icsrc/cuda benchmarks/fp8_limit.cu
 *
 * A CTA has up to three warpgroups. Some repeat the products of a step, others its softmax, for 64 rows, 96 keys and
 * head_dim 128. No warpgroup waits for another one. The program prints the clocks of a step in each warpgroup.
 *
 * The steps of the other head dimensions are compiled with -DHEAD_DIM=64 -DKEYS=128 -DWGS=3, or with -DHEAD_DIM=256
 * -DKEYS=128 -DWGS=2. Two warpgroups leave registers for 256 columns of O. */
#include <cstdio>
#include <cuda_runtime.h>

#define E4M3 1
#include "ptx_sm90.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define KEYS     96
#define WGS      3
#endif

constexpr int STEPS = 2000;
constexpr int CHUNK = HEAD_DIM < 128 ? HEAD_DIM : 128, KEY_CHUNK = KEYS % 128 == 0 ? 128 : 32; /* of swizzled rows */
constexpr int S_REGS = KEYS / 2, O_REGS = HEAD_DIM / 2, P_REGS = KEYS / 8;

enum work { NOTHING = 0, SCORES = 1, OUTPUT = 2, PRODUCTS = SCORES | OUTPUT, SOFTMAX = 4, EXPONENTIALS = 8, REST = 16 };

DEVICE constexpr int row_of(int i) { return i / 2 % 2; }

/* ---- products -------------------------------------------------------------------------------------------------- */

DEVICE void issue_scores(float (&S)[S_REGS], u32 q_desc, u32 k_desc) {
    constexpr u32 high = matrix_descriptor_high(CHUNK);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 32)
        wgmma<KEYS, e4m3>::ss<high, high>(S, q_desc + matrix_descriptor_bytes(k / CHUNK * 64 * CHUNK + k % CHUNK),
                                          k_desc + matrix_descriptor_bytes(k / CHUNK * KEYS * CHUNK + k % CHUNK),
                                          k > 0);
    wgmma_commit_group();
}

DEVICE void issue_output(float (&O)[O_REGS], const u32 (&P)[P_REGS], u32 v_desc) {
    constexpr u32 high = matrix_descriptor_high(KEY_CHUNK);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS; k += 32)
        wgmma<HEAD_DIM, e4m3>::rs<high>(
            O, P + k / 8, v_desc + matrix_descriptor_bytes(k / KEY_CHUNK * HEAD_DIM * KEY_CHUNK + k % KEY_CHUNK), 1);
    wgmma_commit_group();
}

template <int WORK> DEVICE float multiply(u32 q_desc, u32 k_desc, u32 v_desc) {
    float O[O_REGS], S[S_REGS], sum = 0;
    u32 P[P_REGS];
    for (int i = 0; i < O_REGS; i++) O[i] = 0;
    for (int i = 0; i < S_REGS; i++) S[i] = 0;
    for (int i = 0; i < P_REGS; i++) P[i] = 0x38303840u + threadIdx.x;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        pin(O), pin(P);
        if (WORK & SCORES) issue_scores(S, q_desc, k_desc);
        if (WORK & OUTPUT) issue_output(O, P, v_desc);
        if (WORK & SCORES) wgmma_wait_group<0>(S);
        if (WORK & OUTPUT) wgmma_wait_group<0>(O);
    }
    for (int i = 0; i < O_REGS; i++) sum += O[i];
    for (int i = 0; i < S_REGS; i++) sum += S[i];
    return sum;
}

/* ---- softmax --------------------------------------------------------------------------------------------------- */

DEVICE int max_of(int x, float y, float z) { return max(max(x, __float_as_int(y)), __float_as_int(z)); }

/* REST is the softmax without the exponentials. */
template <int WORK> DEVICE float exponentiate(float scale, float row_max) {
    float sum[2] = {0, 0}, first = threadIdx.x * 1e-3f;
    int largest[2] = {0, 0};
    u32 bits = 0;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        float S[S_REGS], odd[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < S_REGS; i++) {
            const float x = fmaf(first + (i + 1) * 1.25e-3f, scale, -(row_of(i) ? row_max + 1 : row_max));
            S[i] = WORK == REST ? x : ex2(x);
        }
#pragma unroll
        for (int i = 0; i < S_REGS; i += 2) {
            const int r = row_of(i);
            if (WORK == EXPONENTIALS) {
                bits ^= __float_as_uint(S[i]) ^ __float_as_uint(S[i + 1]);
            } else if (i % 8 < 4) {
                sum[r] += S[i], odd[r] += S[i + 1], sum[r] += S[i + 4], odd[r] += S[i + 5];
                largest[r] = max_of(largest[r], S[i], S[i + 1]);
                largest[r] = max_of(largest[r], S[i + 4], S[i + 5]);
                bits ^= cvt_e4m3_x4(S[i], S[i + 1], S[i + 4], S[i + 5]);
            }
        }
        sum[0] += odd[0], sum[1] += odd[1], first += 1e-3f;
    }
    return sum[0] + sum[1] + (float)(largest[0] + largest[1]) + (float)bits;
}

/* ---- a measurement --------------------------------------------------------------------------------------------- */

/* Warpgroups before `multiplying` have the products, the others have the softmax. */
template <int PRODUCT, int OTHER>
__global__ void __launch_bounds__(128 * WGS, 1)
    measure(float *out, long long *clocks, float scale, float row_max, int multiplying) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const int wg = uniform(threadIdx.x / 128);
    for (u32 i = threadIdx.x; i < 128 * 1024 / 4; i += blockDim.x)
        ((u32 *)smem)[i] = 0x38383838u ^ (i * 2654435761u & 0x83838383u); /* finite numbers near 1 */
    fence_proxy_async();
    __syncthreads();
    const long long begin = clock64();
    float x = 0;
    if (wg >= multiplying)
        x = OTHER ? exponentiate<OTHER>(scale, row_max) : 0;
    else
        x = multiply<PRODUCT>(matrix_descriptor(smem_address(smem) + wg * 8192, 0),
                              matrix_descriptor(smem_address(smem) + 32768, 0),
                              matrix_descriptor(smem_address(smem) + 65536, 0));
    const long long end = clock64();
    out[threadIdx.x + blockIdx.x * blockDim.x] = x;
    if (threadIdx.x % 128 == 0 && blockIdx.x == 0) clocks[wg] = end - begin;
}

template <int PRODUCT, int OTHER> void report(const char *name, int multiplying, int others) {
    constexpr int SHARED = 128 * 1024;
    const int wgs = multiplying + others;
    if (wgs > WGS) return;
    float *out;
    long long *clocks, found[3] = {0, 0, 0};
    cudaMalloc(&out, 132 * 384 * sizeof(float)), cudaMalloc(&clocks, sizeof found);
    cudaFuncSetAttribute(measure<PRODUCT, OTHER>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    for (int i = 0; i < 2; i++)
        measure<PRODUCT, OTHER><<<132, 128 * wgs, SHARED>>>(out, clocks, 0.1f, 1.0f, multiplying);
    cudaMemcpy(found, clocks, sizeof(long long) * wgs, cudaMemcpyDeviceToHost);
    printf("%s,%d,%d", name, multiplying, others);
    for (int wg = 0; wg < wgs; wg++) printf(",%.1f", found[wg] / (double)STEPS);
    printf("\n");
    cudaFree(out), cudaFree(clocks);
}

int main() {
    printf("work,warpgroups_of_products,warpgroups_of_softmax,clocks of each\n");
    report<PRODUCTS, NOTHING>("products", 1, 0);
    report<PRODUCTS, NOTHING>("products", 2, 0);
    report<PRODUCTS, NOTHING>("products", 3, 0);
    report<NOTHING, SOFTMAX>("softmax", 0, 1);
    report<NOTHING, SOFTMAX>("softmax", 0, 2);
    report<PRODUCTS, SOFTMAX>("both", 1, 1);
    report<PRODUCTS, SOFTMAX>("both", 2, 1);
    report<PRODUCTS, SOFTMAX>("both", 1, 2);
    report<PRODUCTS, EXPONENTIALS>("products; exponentials alone", 1, 2);
    report<PRODUCTS, REST>("products; softmax without exponentials", 1, 1);
    const cudaError_t status = cudaGetLastError();
    if (status) printf("%s\n", cudaGetErrorString(status));
    return status != cudaSuccess;
}
