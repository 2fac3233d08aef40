// Self-attention of heads of 64 channels in one kernel, masked by the items' lengths: scores, softmax and the sum over
// values never leave registers. Made for short sequences (a sentence's symbols, its frames), right for any length.
//
// A block has QUERY_WARPS x 16 queries of one head and goes through the keys in blocks of 64, which KEY_WARPS warps
// share; at the end these put their parts together. Few queries (a batch of 1): 1 x 4, so that the GPU is filled; many:
// 4 x 1, so that keys are read less often.
#include "tensor_cores.cuh"

constexpr int KEYS = 64;
constexpr int WARPS = 4;
constexpr int HEAD = 64;
constexpr int PITCH = HEAD + 4;  // floats of a row of parts

// qkv (B, L, 3, H, 64), out (B, L, H, 64): 0 beyond an item's length. An item of length 0 is all 0.
template <typename T, int QUERY_WARPS> struct Attention {
    static constexpr int KEY_WARPS = WARPS / QUERY_WARPS;
    static constexpr int QUERIES = QUERY_WARPS * 16;
    static constexpr int OWN = KEYS / KEY_WARPS;  // keys of a block that a warp looks at
    static constexpr int BLOCK = 2 * KEYS * ROW;  // values of a block of keys and values

    static __device__ void fetch(T* target, const T* source, int first, int rows, int limit, size_t pitch) {
        for (int place = threadIdx.x; place < rows * CHUNKS; place += 32 * WARPS) {
            const int row = place / CHUNKS, chunk = place % CHUNKS;
            const bool there = first + row < limit;
            copy_async(target + swizzled(row, chunk), source + (there ? (first + row) * pitch + chunk * 8 : 0), there);
        }
    }

    static __device__ void run(const T* qkv, T* out, const int* lengths, int length, int heads) {
        DYNAMIC_SHARED(T, shared);  // queries, then two blocks of keys and values; at the end the warps' parts
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int first = blockIdx.x * QUERIES, head = blockIdx.y, item = blockIdx.z;
        const int limit = item_limit(lengths, item, length);
        const size_t pitch = static_cast<size_t>(3) * heads * HEAD;
        const T* source = qkv + static_cast<size_t>(item) * length * pitch + head * HEAD;
        T* target = out + (static_cast<size_t>(item) * length * heads + head) * HEAD;
        if (first >= limit) {
            clear(target, first, length, heads);
            return;
        }
        T* blocks = shared + QUERIES * ROW;
        const int count = divide_up(limit, KEYS);
        fetch(shared, source, first, QUERIES, limit, pitch);
        fetch(blocks, source + heads * HEAD, 0, KEYS, limit, pitch);
        fetch(blocks + KEYS * ROW, source + 2 * heads * HEAD, 0, KEYS, limit, pitch);
        commit_copies();
        uint32_t query[4][4];
        float sums[8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, weights[2] = {};
        for (int block = 0; block < count; ++block) {
            wait_copies<0>();
            __syncthreads();
            if (block + 1 < count) {
                T* next = blocks + (block + 1) % 2 * BLOCK;
                fetch(next, source + heads * HEAD, (block + 1) * KEYS, KEYS, limit, pitch);
                fetch(next + KEYS * ROW, source + 2 * heads * HEAD, (block + 1) * KEYS, KEYS, limit, pitch);
            }
            commit_copies();
            if (block == 0)
#pragma unroll
                for (int step = 0; step < 4; ++step)
                    load_matrices(query[step], shared + swizzled(warp % QUERY_WARPS * 16 + lane % 16,
                                                                 step * 2 + lane / 16));
            const T* keys = blocks + block % 2 * BLOCK;
            const int own = warp / QUERY_WARPS * OWN;
            if (block * KEYS + own < limit) attend(query, keys, own, limit - block * KEYS, sums, largest, weights);
        }
        wait_copies<0>();
        __syncthreads();  // what is in shared memory is used up
        finish(as<float>(shared), target, sums, largest, weights, first, length, limit, heads);
    }

    // One block's keys own .. own + OWN, of which those below `limit` are there; online softmax in powers of 2.
    static __device__ void attend(const uint32_t (&query)[4][4], const T* keys, int own, int limit, float (&sums)[8][4],
                                  float (&largest)[2], float (&weights)[2]) {
        constexpr float SCALE = 0.125f * 1.4426950408889634f;  // 1 / sqrt(64), and log2(e)
        const int lane = threadIdx.x % 32;
        float scores[OWN / 8][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int n = 0; n < OWN / 16; ++n) {
                uint32_t key[4];
                load_matrices(key, keys + swizzled(own + n * 16 + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
                multiply<T>(scores[2 * n], query[step], key[0], key[1]);
                multiply<T>(scores[2 * n + 1], query[step], key[2], key[3]);
            }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = largest[half];
#pragma unroll
            for (int n = 0; n < OWN / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[n][half * 2 + j];
                    score = own + n * 8 + lane % 4 * 2 + j < limit ? score * SCALE : -INFINITY;
                    most = fmaxf(most, score);
                }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            const float kept = exp2f(largest[half] - most);  // the warp's first key is there, so most is finite
            largest[half] = most;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < OWN / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[n][half * 2 + j];
                    score = exp2f(score - most);
                    sum += score;
                }
            weights[half] = weights[half] * kept + sum;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                sums[n][half * 2] *= kept;
                sums[n][half * 2 + 1] *= kept;
            }
        }
        const T* values = keys + KEYS * ROW;
#pragma unroll
        for (int step = 0; step < OWN / 16; ++step) {
            const float(&low)[4] = scores[2 * step];
            const float(&high)[4] = scores[2 * step + 1];
            const uint32_t weight[4] = {pack_pair<T>(low[0], low[1]), pack_pair<T>(low[2], low[3]),
                                        pack_pair<T>(high[0], high[1]), pack_pair<T>(high[2], high[3])};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t value[4];
                load_transposed(value, values + swizzled(own + step * 16 + lane % 16, n * 2 + lane / 16));
                multiply<T>(sums[2 * n], weight, value[0], value[1]);
                multiply<T>(sums[2 * n + 1], weight, value[2], value[3]);
            }
        }
    }

    // The parts of the warps that shared the keys of 16 queries, put together; and rows beyond the item as 0.
    static __device__ void finish(float* parts, T* target, const float (&sums)[8][4], const float (&largest)[2],
                                  float (&weights)[2], int first, int length, int limit, int heads) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            weights[half] += __shfl_xor_sync(0xffffffffu, weights[half], 1);
            weights[half] += __shfl_xor_sync(0xffffffffu, weights[half], 2);
            float* row = parts + (warp * 16 + lane / 4 + half * 8) * PITCH;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                row[n * 8 + lane % 4 * 2] = sums[n][half * 2];
                row[n * 8 + lane % 4 * 2 + 1] = sums[n][half * 2 + 1];
            }
            if (lane % 4 == 0) {
                row[HEAD] = largest[half];
                row[HEAD + 1] = weights[half];
            }
        }
        __syncthreads();
        for (int place = threadIdx.x; place < QUERIES * CHUNKS; place += 32 * WARPS) {
            const int query = place / CHUNKS, channel = place % CHUNKS * 8;
            if (first + query >= length) break;
            float values[8] = {}, most = -INFINITY, weight = 0;
            if (first + query < limit) {
                // Warp query / 16 + k QUERY_WARPS has part k.
                for (int part = 0; part < KEY_WARPS; ++part)
                    most = fmaxf(most, parts[(part * QUERIES + query) * PITCH + HEAD]);
                for (int part = 0; part < KEY_WARPS; ++part) {
                    const float* row = parts + (part * QUERIES + query) * PITCH;
                    const float factor = exp2f(row[HEAD] - most);
                    weight += row[HEAD + 1] * factor;
                    for (int j = 0; j < 8; ++j) values[j] += row[channel + j] * factor;
                }
                for (int j = 0; j < 8; ++j) values[j] /= weight;
            }
            store_floats<T, 8>(target + static_cast<size_t>(first + query) * heads * HEAD + channel, values);
        }
    }

    static __device__ void clear(T* target, int first, int length, int heads) {
        const float nothing[8] = {};
        for (int place = threadIdx.x; place < QUERIES * CHUNKS; place += 32 * WARPS) {
            const int row = first + place / CHUNKS;
            if (row < length)
                store_floats<T, 8>(target + static_cast<size_t>(row) * heads * HEAD + place % CHUNKS * 8, nothing);
        }
    }

    static constexpr int BYTES = (QUERIES * ROW + 2 * BLOCK) * 2;
    static_assert(WARPS * 16 * PITCH * 4 <= BYTES, "the parts fit where keys and values were");
};

#define DEFINE(NAME, T, QUERY_WARPS)                                                     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                             \
        NAME(const T* qkv, T* out, const int* lengths, int length, int heads) {          \
        Attention<T, QUERY_WARPS>::run(qkv, out, lengths, length, heads);                \
    }
DEFINE(attention64_f16_few, __half, 1)
DEFINE(attention64_f16_many, __half, 4)
DEFINE(attention64_bf16_few, __nv_bfloat16, 1)
DEFINE(attention64_bf16_many, __nv_bfloat16, 4)

#define RUN(NAME, T, QUERY_WARPS)                                                                                    \
    do {                                                                                                             \
        using Kind = Attention<T, QUERY_WARPS>;                                                                      \
        LAUNCH(NAME, dim3(divide_up(length, Kind::QUERIES), heads, batch), 32 * WARPS, Kind::BYTES, stream,          \
               static_cast<const T*>(qkv), static_cast<T*>(out), lengths, length, heads);                            \
        return cudaGetLastError();                                                                                   \
    } while (0)

// `many`: 64 queries a block instead of 16.
extern "C" cudaError_t launch_attention64(const void* qkv, void* out, const int* lengths, int batch, int length,
                                          int heads, int many, int type, cudaStream_t stream) {
    if (batch <= 0 || length <= 0 || heads <= 0) return cudaSuccess;
    if (batch > 65535 || heads > 65535) return cudaErrorInvalidValue;
    if (type == HALF && many) RUN(attention64_f16_many, __half, 4);
    if (type == HALF) RUN(attention64_f16_few, __half, 1);
    if (type == BFLOAT && many) RUN(attention64_bf16_many, __nv_bfloat16, 4);
    if (type == BFLOAT) RUN(attention64_bf16_few, __nv_bfloat16, 1);
    return cudaErrorInvalidValue;
}
