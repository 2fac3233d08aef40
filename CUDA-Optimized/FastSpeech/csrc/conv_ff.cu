// Convolutions of kernel 1 or 3 over (B, L, C) as implicit matrix products on tensor cores: nothing is unfolded in
// memory; block rows are positions, and tap k of the kernel reads rows shifted by k - kernel / 2.
//
// What follows a product is done while it is in registers: bias, ReLU, masks. A layer norm needs whole rows, which
// several blocks make (parts of the outputs, parts of the sum): each leaves its float32 part in a workspace, and the
// last block of a tile of rows to arrive, found by a counter, adds the parts in a fixed order, adds bias and residual
// and normalises in two passes from registers. So both the product and the sum spread over the GPU in one launch.
#include "warpgroups.cuh"

constexpr int RELU = 1, NORM = 2;  // bits of `mode`
constexpr int WIDEST = 1024;       // outputs of a row that is normalised

struct Problem {
    const void* x;         // (B, L, inputs)
    const void* weight;    // (outputs, kernel, inputs)
    const void* bias;      // (outputs) or null
    const void* residual;  // (B, L, outputs) or null, with NORM
    const void* gain;      // (outputs) of the norm
    const void* shift;     // (outputs) of the norm
    void* out;             // (B, L, outputs), 0 beyond an item's length
    float* parts;          // (splits, B, L, outputs), with NORM
    int* arrived;          // (B * tiles of rows), 0 before and after, with NORM
    const int* lengths;    // (B) or null
    int batch, length, inputs, outputs, kernel, mode;
    float epsilon;
};

// GROUPS: products of warpgroups where there are any; a warp then has 16 rows and all columns.
template <typename T, int ROWS, int COLUMNS, int WARPS_M, int WARPS_N, int STAGES, bool GROUPS = false>
struct Convolution {
    static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
    static constexpr int TOGETHER = (GROUPS ? 256 : 512) / THREADS;  // blocks on a processor
    static constexpr int TILES_M = ROWS / WARPS_M / 16, TILES_N = COLUMNS / WARPS_N / 8;
    static constexpr int STAGE = (ROWS + COLUMNS) * ROW;  // values
    static constexpr int BYTES = STAGE * STAGES * 2 + (GROUPS ? SWIZZLE : 0);
    static_assert(TILES_N % 2 == 0, "two tiles of columns are loaded at once");
    static_assert(!GROUPS || (TILES_M == 1 && WARPS_N == 1 && ROWS % 64 == 0), "a warpgroup has 64 rows");

    static __device__ T* aligned(T* place) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(place);
        return place + ((SWIZZLE - address % SWIZZLE) % SWIZZLE) / sizeof(T);
    }

    // Blocks of 64 input channels of one tap into shared memory. Rows beyond the item read as 0.
    static __device__ void fetch(const Problem& p, T* stage, int item, int first, int column, int limit, int block) {
        const int chunks = divide_up(p.inputs, ROW), tap = block / chunks, channel = block % chunks * ROW;
        const T* x = static_cast<const T*>(p.x) + static_cast<size_t>(item) * p.length * p.inputs;
        const T* weight = static_cast<const T*>(p.weight);
        for (int place = threadIdx.x; place < ROWS * CHUNKS; place += THREADS) {
            const int row = place / CHUNKS, chunk = place % CHUNKS, source = first + row + tap - p.kernel / 2;
            const bool there = source >= 0 && source < limit && channel + chunk * 8 < p.inputs;
            const size_t offset = there ? static_cast<size_t>(source) * p.inputs + channel + chunk * 8 : 0;
            copy_async(stage + swizzled(row, chunk), x + offset, there);
        }
        stage += ROWS * ROW;
        for (int place = threadIdx.x; place < COLUMNS * CHUNKS; place += THREADS) {
            const int row = place / CHUNKS, chunk = place % CHUNKS, output = column + row;
            const bool there = output < p.outputs && channel + chunk * 8 < p.inputs;
            const size_t offset =
                there ? (static_cast<size_t>(output) * p.kernel + tap) * p.inputs + channel + chunk * 8 : 0;
            copy_async(stage + swizzled(row, chunk), weight + offset, there);
        }
    }

    static __device__ void accumulate(const T* stage, float (&sums)[TILES_M][TILES_N][4]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row = warp % WARPS_M * (ROWS / WARPS_M), column = ROWS + warp / WARPS_M * (COLUMNS / WARPS_N);
#pragma unroll
        for (int step = 0; step < ROW / 16; ++step) {
            uint32_t a[TILES_M][4], b[TILES_N / 2][4];
#pragma unroll
            for (int m = 0; m < TILES_M; ++m)
                load_matrices(a[m], stage + swizzled(row + m * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < TILES_N / 2; ++n)
                load_matrices(b[n], stage + swizzled(column + n * 16 + lane % 8 + lane / 16 * 8,
                                                     step * 2 + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < TILES_M; ++m)
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
                    multiply<T>(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }

    // Pairs of neighbouring columns to memory: finished values, or parts of sums.
    static __device__ void store(const Problem& p, const float (&sums)[TILES_M][TILES_N][4], int item, int first,
                                 int column, int limit) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const size_t start = static_cast<size_t>(item) * p.length;
        const size_t part = static_cast<size_t>(blockIdx.z) * p.batch * p.length;
        const T* bias = static_cast<const T*>(p.bias);
#pragma unroll
        for (int m = 0; m < TILES_M; ++m)
#pragma unroll
            for (int n = 0; n < TILES_N; ++n) {
                const int output = column + warp / WARPS_M * (COLUMNS / WARPS_N) + n * 8 + lane % 4 * 2;
                if (output >= p.outputs) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = first + warp % WARPS_M * (ROWS / WARPS_M) + m * 16 + lane / 4 + half * 8;
                    if (row >= p.length) continue;
                    float low = sums[m][n][half * 2], high = sums[m][n][half * 2 + 1];
                    if (p.mode & NORM) {
                        const float pair[2] = {low, high};
                        if (row < limit)
                            store_floats<float, 2>(p.parts + (part + start + row) * p.outputs + output, pair);
                        continue;
                    }
                    if (bias != nullptr) {
                        float added[2];
                        load_floats<T, 2>(bias + output, added);
                        low += added[0];
                        high += added[1];
                    }
                    if (p.mode & RELU) {
                        low = fmaxf(low, 0.0f);
                        high = fmaxf(high, 0.0f);
                    }
                    const float pair[2] = {row < limit ? low : 0.0f, row < limit ? high : 0.0f};
                    store_floats<T, 2>(static_cast<T*>(p.out) + (start + row) * p.outputs + output, pair);
                }
            }
    }

    // A warp takes TOGETHER rows at once: the parts' sum, bias, ReLU, residual, layer norm. What other blocks wrote is
    // read where they meet, in the second-level cache, many loads at a time, since each takes long.
    template <int VECTORS, int TOGETHER>
    static __device__ void normalise(const Problem& p, int item, int first, int limit) {
        constexpr int AT_ONCE = TOGETHER;  // parts
        const int lane = threadIdx.x % 32, splits = gridDim.z;
        const int end = first + ROWS < p.length ? first + ROWS : p.length;
        const size_t size = static_cast<size_t>(p.batch) * p.length * p.outputs;
        for (int row = first + threadIdx.x / 32 * TOGETHER; row < end; row += THREADS / 32 * TOGETHER) {
            const size_t start = (static_cast<size_t>(item) * p.length + row) * p.outputs;
            float values[TOGETHER][VECTORS][4] = {};
            for (int split = 0; split < splits; split += AT_ONCE) {
                float4 parts[AT_ONCE][TOGETHER][VECTORS];
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s)
#pragma unroll
                    for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
                        for (int i = 0; i < VECTORS; ++i) {
                            const int output = (i * 32 + lane) * 4;
                            parts[s][r][i] = {0, 0, 0, 0};
                            const float* source = p.parts + (split + s) * size + start + r * p.outputs + output;
                            if (split + s < splits && row + r < end && row + r < limit && output < p.outputs)
                                parts[s][r][i] = read_shared(source);
                        }
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s)
#pragma unroll
                    for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
                        for (int i = 0; i < VECTORS; ++i) {
                            const float4 part = parts[s][r][i];
                            float(&sum)[4] = values[r][i];
                            sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
                        }
            }
#pragma unroll
            for (int r = 0; r < TOGETHER; ++r)
                if (row + r < end)
                    finish<VECTORS>(p, values[r], start + static_cast<size_t>(r) * p.outputs, row + r < limit);
        }
    }

    template <int VECTORS>
    static __device__ void finish(const Problem& p, float (&values)[VECTORS][4], size_t start, bool within) {
        const int lane = threadIdx.x % 32;
        float sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int output = (i * 32 + lane) * 4;
            if (output >= p.outputs || !within) continue;
            float other[4];
            if (p.bias != nullptr) {
                load_floats<T, 4>(static_cast<const T*>(p.bias) + output, other);
#pragma unroll
                for (int j = 0; j < 4; ++j) values[i][j] += other[j];
            }
            if (p.mode & RELU)
#pragma unroll
                for (int j = 0; j < 4; ++j) values[i][j] = fmaxf(values[i][j], 0.0f);
            if (p.residual != nullptr) {
                load_floats<T, 4>(static_cast<const T*>(p.residual) + start + output, other);
#pragma unroll
                for (int j = 0; j < 4; ++j) values[i][j] += other[j];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += values[i][j];
        }
        const float mean = warp_sum(sum) / p.outputs;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if ((i * 32 + lane) * 4 >= p.outputs) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) squares += (values[i][j] - mean) * (values[i][j] - mean);
        }
        const float scale = rsqrtf(warp_sum(squares) / p.outputs + p.epsilon);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int output = (i * 32 + lane) * 4;
            if (output >= p.outputs) continue;
            float gain[4], shift[4];
            load_floats<T, 4>(static_cast<const T*>(p.gain) + output, gain);
            load_floats<T, 4>(static_cast<const T*>(p.shift) + output, shift);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                values[i][j] = within ? (values[i][j] - mean) * scale * gain[j] + shift[j] : 0.0f;
            store_floats<T, 4>(static_cast<T*>(p.out) + start + output, values[i]);
        }
    }

    static __device__ void clear(const Problem& p, int item, int first, int column) {
        const float nothing[8] = {};
        for (int place = threadIdx.x; place < ROWS * (COLUMNS / 8); place += THREADS) {
            const int row = first + place / (COLUMNS / 8), output = column + place % (COLUMNS / 8) * 8;
            if (row < p.length && output < p.outputs)
                store_floats<T, 8>(static_cast<T*>(p.out) + (static_cast<size_t>(item) * p.length + row) * p.outputs +
                                       output,
                                   nothing);
        }
    }

    // The sums of `count` blocks of the product from `from` on, by single warps.
    static __device__ void add_up(const Problem& p, T* shared, float (&sums)[TILES_M][TILES_N][4], int item, int first,
                                  int column, int limit, int from, int count) {
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) {
            if (stage < count) fetch(p, shared + stage * STAGE, item, first, column, limit, from + stage);
            commit_copies();
        }
        for (int block = 0; block < count; ++block) {
            wait_copies<STAGES - 2>();
            __syncthreads();  // everyone's copies are there, and the stage that is fetched next is used up
            const int next = block + STAGES - 1;
            if (next < count) fetch(p, shared + next % STAGES * STAGE, item, first, column, limit, from + next);
            commit_copies();
            accumulate(shared + block % STAGES * STAGE, sums);
        }
    }

    // The same by warpgroups, whose products run on while the next block is fetched: the stage that is written then was
    // used by the products before the last, which every warp has waited for before the barrier.
    static __device__ void add_up_by_groups(const Problem& p, T* shared, float (&sums)[TILES_M][TILES_N][4], int item,
                                            int first, int column, int limit, int from, int count) {
#pragma unroll
        for (int stage = 0; stage < STAGES - 2; ++stage) {
            if (stage < count) fetch(p, shared + stage * STAGE, item, first, column, limit, from + stage);
            commit_copies();
        }
        for (int block = 0; block < count; ++block) {
            wait_copies<STAGES - 3>();
            show_to_products();
            __syncthreads();
            const T* stage = shared + block % STAGES * STAGE;
            begin_products();
#pragma unroll
            for (int step = 0; step < ROW / 16; ++step)
                multiply_group<T, TILES_N>(sums[0], stage + threadIdx.x / 128 * 64 * ROW, stage + ROWS * ROW, step);
            commit_products();
            const int next = block + STAGES - 2;
            if (next < count) fetch(p, shared + next % STAGES * STAGE, item, first, column, limit, from + next);
            commit_copies();
            wait_products<1>();
        }
        wait_products<0>();
    }

    // Grid: (items x tiles of rows, tiles of outputs, parts of the sum).
    static __device__ void run(const Problem& p) {
        DYNAMIC_SHARED(T, raw);
        __shared__ int last;
        T* shared = GROUPS ? aligned(raw) : raw;
        const int tiles = divide_up(p.length, ROWS), item = blockIdx.x / tiles;
        const int first = blockIdx.x % tiles * ROWS, column = blockIdx.y * COLUMNS;
        const int limit = item_limit(p.lengths, item, p.length);
        if (first >= limit) {  // nothing but padding: no work, and the whole tile agrees on that
            if (blockIdx.z == 0) clear(p, item, first, column);
            return;
        }
        const int blocks = p.kernel * divide_up(p.inputs, ROW);
        const int from = static_cast<int>(static_cast<long long>(blocks) * blockIdx.z / gridDim.z);
        const int count = static_cast<int>(static_cast<long long>(blocks) * (blockIdx.z + 1) / gridDim.z) - from;
        float sums[TILES_M][TILES_N][4] = {};
        if constexpr (GROUPS && HAS_WARPGROUPS)
            add_up_by_groups(p, shared, sums, item, first, column, limit, from, count);
        else
            add_up(p, shared, sums, item, first, column, limit, from, count);
        store(p, sums, item, first, column, limit);
        if (!(p.mode & NORM)) return;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            const int all = gridDim.y * gridDim.z;
            last = atomicAdd(p.arrived + blockIdx.x, 1) == all - 1;
            if (last) p.arrived[blockIdx.x] = 0;  // for the next launch
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        if (p.outputs <= 384) normalise<3, 2>(p, item, first, limit);
        else normalise<WIDEST / 128, 1>(p, item, first, limit);
    }
};

template <typename T> using Small = Convolution<T, 32, 64, 2, 2, 5>;
template <typename T> using Medium = Convolution<T, 64, 64, 2, 2, 4>;
template <typename T> using Large = Convolution<T, 128, 128, 2, 4, 3>;
template <typename T> using Group = Convolution<T, 64, 128, 4, 1, 4, true>;
template <typename T> using Pair = Convolution<T, 128, 128, 8, 1, 3, true>;

#define DEFINE(NAME, T, TILE)                                                                                       \
    extern "C" __global__ void __launch_bounds__(TILE<T>::THREADS, TILE<T>::TOGETHER)                          \
        NAME(const T* x, const T* weight, const T* bias, const T* residual, const T* gain, const T* shift, T* out,  \
             float* parts, int* arrived, const int* lengths, int batch, int length, int inputs, int outputs,        \
             int kernel, int mode, float epsilon) {                                                                 \
        TILE<T>::run({x, weight, bias, residual, gain, shift, out, parts, arrived, lengths, batch, length, inputs, \
                      outputs, kernel, mode, epsilon});                                                             \
    }
DEFINE(convolution_f16_small, __half, Small)
DEFINE(convolution_f16_medium, __half, Medium)
DEFINE(convolution_f16_large, __half, Large)
DEFINE(convolution_f16_group, __half, Group)
DEFINE(convolution_f16_pair, __half, Pair)
DEFINE(convolution_bf16_small, __nv_bfloat16, Small)
DEFINE(convolution_bf16_medium, __nv_bfloat16, Medium)
DEFINE(convolution_bf16_large, __nv_bfloat16, Large)
DEFINE(convolution_bf16_group, __nv_bfloat16, Group)
DEFINE(convolution_bf16_pair, __nv_bfloat16, Pair)

#define RUN(NAME, T, TILE, ROWS, COLUMNS)                                                                             \
    do {                                                                                                              \
        const long long rows = static_cast<long long>(batch) * divide_up(length, ROWS);                               \
        if (rows > 0x7fffffff || divide_up(outputs, COLUMNS) > 65535) return cudaErrorInvalidValue;                   \
        const cudaError_t allowed = ALLOW_SHARED(NAME, TILE<T>::BYTES);                                               \
        if (allowed != cudaSuccess) return allowed;                                                                   \
        LAUNCH(NAME, dim3(static_cast<unsigned>(rows), divide_up(outputs, COLUMNS), splits), TILE<T>::THREADS,        \
               TILE<T>::BYTES, stream, static_cast<const T*>(x), static_cast<const T*>(weight),                       \
               static_cast<const T*>(bias), static_cast<const T*>(residual), static_cast<const T*>(gain),             \
               static_cast<const T*>(shift), static_cast<T*>(out), parts, arrived, lengths, batch, length, inputs,    \
               outputs, kernel, mode, epsilon);                                                                       \
        return cudaGetLastError();                                                                                    \
    } while (0)

// `tile`: 0 small (32 x 64), 1 medium (64 x 64), 2 large (128 x 128), 3 a warpgroup's (64 x 128), 4 two's (128 x 128). `splits` of the sum: with NORM only.
extern "C" cudaError_t launch_convolution(const void* x, const void* weight, const void* bias, const void* residual,
                                          const void* gain, const void* shift, void* out, float* parts, int* arrived,
                                          const int* lengths, int batch, int length, int inputs, int outputs,
                                          int kernel, int mode, float epsilon, int tile, int splits, int type,
                                          cudaStream_t stream) {
    if (batch <= 0 || length <= 0) return cudaSuccess;
    const bool norm = mode & NORM;
    if (inputs <= 0 || inputs % 8 || outputs <= 0 || outputs % 8 || (kernel != 1 && kernel != 3) || splits < 1 ||
        splits > 65535 || length > 0x7fffff00 || inputs > 0x7fffff00 || outputs > 0x7fffff00 ||
        (!norm && (splits > 1 || residual != nullptr)) || (norm && outputs > WIDEST))
        return cudaErrorInvalidValue;
    if (type == HALF && tile == 0) RUN(convolution_f16_small, __half, Small, 32, 64);
    if (type == HALF && tile == 1) RUN(convolution_f16_medium, __half, Medium, 64, 64);
    if (type == HALF && tile == 2) RUN(convolution_f16_large, __half, Large, 128, 128);
    if (type == HALF && tile == 3) RUN(convolution_f16_group, __half, Group, 64, 128);
    if (type == HALF && tile == 4) RUN(convolution_f16_pair, __half, Pair, 128, 128);
    if (type == BFLOAT && tile == 0) RUN(convolution_bf16_small, __nv_bfloat16, Small, 32, 64);
    if (type == BFLOAT && tile == 1) RUN(convolution_bf16_medium, __nv_bfloat16, Medium, 64, 64);
    if (type == BFLOAT && tile == 2) RUN(convolution_bf16_large, __nv_bfloat16, Large, 128, 128);
    if (type == BFLOAT && tile == 3) RUN(convolution_bf16_group, __nv_bfloat16, Group, 64, 128);
    if (type == BFLOAT && tile == 4) RUN(convolution_bf16_pair, __nv_bfloat16, Pair, 128, 128);
    return cudaErrorInvalidValue;
}
