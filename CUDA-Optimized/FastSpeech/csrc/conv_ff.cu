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

    // What a thread copies of every block of 64 input channels of one tap: the same 16-byte chunk of every LINES-th row
    // and column. So a step costs a comparison and an addition a copy, which matters where a processor has few warps.
    struct Source {
        static constexpr int LINES = THREADS / CHUNKS;
        static_assert(ROWS % LINES == 0 && COLUMNS % LINES == 0 && LINES % 8 == 0, "rows of one chunk permuted alike");
        const T *x, *weight;  // its chunk of the item's row `row`, of output `column`, both of tap 0 and channel 0
        int row, column, offset, tap, channel;

        __device__ Source(const Problem& p, int item, int first, int block_column, int block) {
            const int chunks = divide_up(p.inputs, ROW), line = threadIdx.x / CHUNKS;
            offset = threadIdx.x % CHUNKS * 8;
            row = first + line - p.kernel / 2;
            column = block_column + line;
            tap = block / chunks;
            channel = block % chunks * ROW;
            x = static_cast<const T*>(p.x) + (static_cast<ptrdiff_t>(item) * p.length + row) * p.inputs + offset;
            weight = static_cast<const T*>(p.weight) + static_cast<ptrdiff_t>(column) * p.kernel * p.inputs + offset;
        }

        // The next block into shared memory. Rows beyond the item read as 0.
        __device__ void fetch(const Problem& p, T* stage, int limit) {
            const bool inside = channel + offset < p.inputs;
            const ptrdiff_t place = static_cast<ptrdiff_t>(tap) * p.inputs + channel;
            const ptrdiff_t x_step = static_cast<ptrdiff_t>(LINES) * p.inputs, weight_step = x_step * p.kernel;
            T* target = stage + swizzled(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
#pragma unroll
            for (int i = 0; i < ROWS / LINES; ++i) {
                const int at = row + tap + i * LINES;
                const bool there = inside && at >= 0 && at < limit;
                copy_async(target + i * LINES * ROW, there ? x + place + i * x_step : p.x, there);
            }
#pragma unroll
            for (int i = 0; i < COLUMNS / LINES; ++i) {
                const bool there = inside && column + i * LINES < p.outputs;
                const void* at = there ? weight + place + i * weight_step : p.weight;
                copy_async(target + (ROWS + i * LINES) * ROW, at, there);
            }
            channel += ROW;
            if (channel >= p.inputs) channel = 0, ++tap;
        }
    };

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

    // Four neighbouring values of each of a warp's lanes, VECTORS times: up to 128 * VECTORS channels of a row.
    template <int VECTORS> struct Channels {
        Vector<uint32_t, 2> at[VECTORS] = {};

        __device__ void load(const void* source, int outputs, size_t start = 0) {
            if (source == nullptr) return;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int output = (i * 32 + static_cast<int>(threadIdx.x) % 32) * 4;
                const T* place = static_cast<const T*>(source) + start + output;
                if (output < outputs) at[i] = *as<const Vector<uint32_t, 2>>(place);
            }
        }

        __device__ float value(int i, int j) const {
            return to_float(as<const Vector<T, 4>>(&at[i])->values[j]);
        }

        // Forget what the values are known to be, or the compiler keeps them as float32 from row to row and spills.
        __device__ void forget() {
#ifndef FASTSPEECH_HOST
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) asm volatile("" : "+r"(at[i].values[0]), "+r"(at[i].values[1]));
#endif
        }
    };

    // A warp takes TOGETHER rows at once: the parts' sum, bias, ReLU, residual, layer norm. What other blocks wrote is
    // read where they meet, in the second-level cache, many loads at a time, since each takes long; bias, gain and
    // shift are read once.
    template <int VECTORS, int TOGETHER>
    static __device__ void normalise(const Problem& p, int item, int first, int limit) {
        constexpr int AT_ONCE = TOGETHER;  // parts
        const int lane = threadIdx.x % 32, splits = gridDim.z;
        const int end = first + ROWS < p.length ? first + ROWS : p.length;
        const size_t size = static_cast<size_t>(p.batch) * p.length * p.outputs;
        constexpr bool KEPT = VECTORS <= 3;  // bias, gain and shift in registers, or else read where they are needed
        Channels<VECTORS> bias, gain, shift;
        if (KEPT) bias.load(p.bias, p.outputs), gain.load(p.gain, p.outputs), shift.load(p.shift, p.outputs);
        for (int row = first + threadIdx.x / 32 * TOGETHER; row < end; row += THREADS / 32 * TOGETHER) {
            const size_t start = (static_cast<size_t>(item) * p.length + row) * p.outputs;
            bias.forget(), gain.forget(), shift.forget();
            Channels<VECTORS> residual[TOGETHER];
            if (KEPT)
#pragma unroll
                for (int r = 0; r < TOGETHER; ++r)
                    if (row + r < end) residual[r].load(p.residual, p.outputs, start + r * p.outputs);
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
                    finish<KEPT>(p, values[r], residual[r], bias, gain, shift,
                                 start + static_cast<size_t>(r) * p.outputs, row + r < limit);
        }
    }

    template <bool KEPT, int VECTORS>
    static __device__ void finish(const Problem& p, float (&values)[VECTORS][4], Channels<VECTORS>& residual,
                                  Channels<VECTORS>& bias, Channels<VECTORS>& gain, Channels<VECTORS>& shift,
                                  size_t start, bool within) {
        const int lane = threadIdx.x % 32;
        if (!KEPT) bias.load(p.bias, p.outputs), residual.load(p.residual, p.outputs, start);
        float sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if ((i * 32 + lane) * 4 >= p.outputs || !within) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float value = values[i][j] + bias.value(i, j);
                if (p.mode & RELU) value = fmaxf(value, 0.0f);
                values[i][j] = value + residual.value(i, j);
                sum += values[i][j];
            }
        }
        const float mean = warp_sum(sum) / p.outputs;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if ((i * 32 + lane) * 4 >= p.outputs) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) squares += (values[i][j] - mean) * (values[i][j] - mean);
        }
        const float scale = rsqrtf(warp_sum(squares) / p.outputs + p.epsilon);
        if (!KEPT) gain.load(p.gain, p.outputs), shift.load(p.shift, p.outputs);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int output = (i * 32 + lane) * 4;
            if (output >= p.outputs) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                values[i][j] = within ? (values[i][j] - mean) * scale * gain.value(i, j) + shift.value(i, j) : 0.0f;
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
        Source source(p, item, first, column, from);
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) {
            if (stage < count) source.fetch(p, shared + stage * STAGE, limit);
            commit_copies();
        }
        for (int block = 0; block < count; ++block) {
            wait_copies<STAGES - 2>();
            __syncthreads();  // everyone's copies are there, and the stage that is fetched next is used up
            const int next = block + STAGES - 1;
            if (next < count) source.fetch(p, shared + next % STAGES * STAGE, limit);
            commit_copies();
            accumulate(shared + block % STAGES * STAGE, sums);
        }
    }

    // The same by warpgroups, whose products run on while the next block is fetched: the stage that is written then was
    // used by the products before the last, which every warp has waited for before the barrier.
    static __device__ void add_up_by_groups(const Problem& p, T* shared, float (&sums)[TILES_M][TILES_N][4], int item,
                                            int first, int column, int limit, int from, int count) {
        Source source(p, item, first, column, from);
#pragma unroll
        for (int stage = 0; stage < STAGES - 2; ++stage) {
            if (stage < count) source.fetch(p, shared + stage * STAGE, limit);
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
            if (next < count) source.fetch(p, shared + next % STAGES * STAGE, limit);
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

// `tile`: 0 small (32 x 64), 1 medium (64 x 64), 2 large (128 x 128), 3 a warpgroup's (64 x 128), 4 two's (128 x 128).
// `splits` of the sum: with NORM only.
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
