// The duration predictor (Ren et al. 2019, 3.3) from hidden states to whole frames in one kernel: convolution, ReLU,
// norm, convolution, ReLU, norm, a linear layer, exp, rounding, and the controls of speed, emphasis and pauses.
//
// A block predicts OUTPUTS symbols. It makes the 16 rows of the first convolution that these need (one more on each
// side), so nothing goes through memory between. Weights are read once by a block, straight to registers, 16 bytes a
// lane: the order of terms in a sum is free, so lane t of four takes input channels 8t .. 8t + 7 of 32, and x is read
// alike.
#include "tensor_cores.cuh"

constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int OUTPUTS = ROWS - 2;
constexpr int HALO = ROWS + 2;  // rows that a convolution reads
constexpr int AHEAD = 4;        // blocks of weights under way

struct Predictor {
    const void* x;                                                  // (B, T, inputs)
    const void *weight1, *bias1, *gain1, *shift1;                   // (P, 3, inputs), (P), (P), (P)
    const void *weight2, *bias2, *gain2, *shift2;                   // (P, 3, P), (P), (P), (P)
    const void *weight3, *bias3;                                    // (P), (1)
    const int* lengths;                                             // (B) or null
    const float *speed, *emphasis;                                  // (B), (B, T) or null
    const int* pauses;                                              // (B, T) or null
    float* logs;                                                    // (B, T)
    int* durations;                                                 // (B, T)
    int symbols, inputs, longest;
    float epsilon;
};

// sums[n] (16 x 8 each, columns from `column`) = convolution of rows 0 .. HALO of `rows`, whose pitch is `pitch`.
template <typename T, int TILES>
__device__ inline void convolve(const T* rows, int pitch, const T* weight, int inputs, int column,
                                float (&sums)[TILES][4]) {
    const int lane = threadIdx.x % 32, group = lane / 4, part = lane % 4 * 8;
    const int per_tap = inputs / 32, count = 3 * per_tap;
    // A column's weights are one row of 3 * inputs values, and so are three neighbouring rows of x but for the pitch.
    const T* source = weight + static_cast<size_t>(column + group) * 3 * inputs + part;
    uint4 ahead[AHEAD][TILES];
#pragma unroll
    for (int slot = 0; slot < AHEAD; ++slot)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
            if (slot < count)
                ahead[slot][n] = *as<const uint4>(source + n * 8 * 3 * inputs + slot * 32);
    for (int base = 0; base < count; base += AHEAD) {
#pragma unroll
        for (int slot = 0; slot < AHEAD; ++slot) {
            const int block = base + slot;
            if (block >= count) break;
            const int tap = block / per_tap, channel = block % per_tap * 32 + part;
            const uint4 upper = *as<const uint4>(rows + (group + tap) * pitch + channel);
            const uint4 lower = *as<const uint4>(rows + (group + 8 + tap) * pitch + channel);
            const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y};
            const uint32_t second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const uint4 own = ahead[slot][n];
                multiply<T>(sums[n], first, own.x, own.y);
                multiply<T>(sums[n], second, own.z, own.w);
                if (block + AHEAD < count)
                    ahead[slot][n] =
                        *as<const uint4>(source + n * 8 * 3 * inputs + (block + AHEAD) * 32);
            }
        }
    }
}

// Bias and ReLU of a convolution's sums, to shared memory as (16, pitch).
template <typename T, int TILES>
__device__ inline void rectify(const float (&sums)[TILES][4], const T* bias, int column, float* target, int pitch) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int output = column + n * 8 + lane % 4 * 2 + j % 2;
            target[(lane / 4 + j / 2 * 8) * pitch + output] = fmaxf(sums[n][j] + to_float(bias[output]), 0.0f);
        }
}

// The norm of one row of P = 64 TILES values by one warp: lane l gets values l, l + 32, ...
template <typename T, int TILES>
__device__ inline void normalise(const float* row, const T* gain, const T* shift, float epsilon,
                                 float (&values)[2 * TILES]) {
    const int lane = threadIdx.x % 32;
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) sum += values[i] = row[i * 32 + lane];
    const float mean = warp_sum(sum) / (64 * TILES);
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) squares += (values[i] - mean) * (values[i] - mean);
    const float scale = rsqrtf(warp_sum(squares) / (64 * TILES) + epsilon);
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
        values[i] = (values[i] - mean) * scale * to_float(gain[i * 32 + lane]) + to_float(shift[i * 32 + lane]);
}

// Whole frames of a symbol: rounded half up, at most `longest`, 0 for what is not a number; then the pause, down to 0.
__device__ inline int whole_frames(const Predictor& p, float log, int item, size_t place) {
    float frames = fminf(fmaxf(expf(log) - 1.0f, 0.0f), static_cast<float>(p.longest));
    if (p.emphasis != nullptr) frames *= p.emphasis[place];
    if (p.speed != nullptr) frames /= p.speed[item];
    frames = fminf(fmaxf(floorf(frames + 0.5f), 0.0f), static_cast<float>(p.longest));
    const long long all = static_cast<long long>(frames) + (p.pauses != nullptr ? p.pauses[place] : 0);
    return static_cast<int>(all < 0 ? 0 : (all < 0x7fffffff ? all : 0x7fffffff));
}

template <typename T, int TILES> __device__ inline void predict(const Predictor& p) {
    constexpr int P = 64 * TILES, PITCH = P + 8, FLOATS = P + 4;
    DYNAMIC_SHARED(T, shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * OUTPUTS, item = blockIdx.y, limit = item_limit(p.lengths, item, p.symbols);
    const size_t start = static_cast<size_t>(item) * p.symbols;
    if (first >= limit) {
        if (threadIdx.x < OUTPUTS && first + threadIdx.x < p.symbols) {
            p.logs[start + first + threadIdx.x] = 0;
            p.durations[start + first + threadIdx.x] = 0;
        }
        return;
    }
    const int pitch = p.inputs + 8;
    T* rows = shared;                                                // (HALO, pitch): symbols first - 2 and following
    T* hidden = rows + HALO * pitch;                                 // (HALO, PITCH): symbols first - 1 and following
    float* sums_of = as<float>(hidden + HALO * PITCH);               // (ROWS, FLOATS)
    const int chunks = p.inputs / 8;
    const T* x = static_cast<const T*>(p.x) + start * p.inputs;
    for (int place = threadIdx.x; place < HALO * chunks; place += 32 * WARPS) {
        const int row = place / chunks, symbol = first - 2 + row;
        const bool there = symbol >= 0 && symbol < limit;
        copy_async(rows + row * pitch + place % chunks * 8,
                   x + (there ? static_cast<size_t>(symbol) * p.inputs + place % chunks * 8 : 0), there);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();

    const int column = warp * (P / WARPS);
    float sums[TILES][4] = {}, values[2 * TILES];
    convolve<T, TILES>(rows, pitch, static_cast<const T*>(p.weight1), p.inputs, column, sums);
    rectify<T, TILES>(sums, static_cast<const T*>(p.bias1), column, sums_of, FLOATS);
    __syncthreads();
    for (int row = warp; row < HALO; row += WARPS) {
        const int symbol = first - 1 + row;
        const bool there = row < ROWS && symbol >= 0 && symbol < limit;
        if (there)
            normalise<T, TILES>(sums_of + row * FLOATS, static_cast<const T*>(p.gain1), static_cast<const T*>(p.shift1),
                                p.epsilon, values);
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i)
            hidden[row * PITCH + i * 32 + lane] = from_float<T>(there ? values[i] : 0.0f);
    }
    __syncthreads();

#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[n][j] = 0;
    convolve<T, TILES>(hidden, PITCH, static_cast<const T*>(p.weight2), P, column, sums);
    rectify<T, TILES>(sums, static_cast<const T*>(p.bias2), column, sums_of, FLOATS);
    __syncthreads();
    for (int row = warp; row < OUTPUTS && first + row < p.symbols; row += WARPS) {
        float log = 0;
        int frames = 0;
        if (first + row < limit) {
            normalise<T, TILES>(sums_of + row * FLOATS, static_cast<const T*>(p.gain2), static_cast<const T*>(p.shift2),
                                p.epsilon, values);
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i)
                log += values[i] * to_float(static_cast<const T*>(p.weight3)[i * 32 + lane]);
            log = warp_sum(log) + to_float(*static_cast<const T*>(p.bias3));
            frames = whole_frames(p, log, item, start + first + row);
        }
        if (lane == 0) {
            p.logs[start + first + row] = log;
            p.durations[start + first + row] = frames;
        }
    }
}

#define DEFINE(NAME, T, TILES)                                                                                        \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                          \
        NAME(const T* x, const T* weight1, const T* bias1, const T* gain1, const T* shift1, const T* weight2,         \
             const T* bias2, const T* gain2, const T* shift2, const T* weight3, const T* bias3, const int* lengths,   \
             const float* speed, const float* emphasis, const int* pauses, float* logs, int* durations, int symbols,  \
             int inputs, int longest, float epsilon) {                                                                \
        predict<T, TILES>({x, weight1, bias1, gain1, shift1, weight2, bias2, gain2, shift2, weight3, bias3, lengths,  \
                           speed, emphasis, pauses, logs, durations, symbols, inputs, longest, epsilon});             \
    }
DEFINE(duration_predictor_f16_128, __half, 2)
DEFINE(duration_predictor_f16_256, __half, 4)
DEFINE(duration_predictor_bf16_128, __nv_bfloat16, 2)
DEFINE(duration_predictor_bf16_256, __nv_bfloat16, 4)

#define RUN(NAME, T)                                                                                                 \
    do {                                                                                                             \
        const cudaError_t allowed = ALLOW_SHARED(NAME, bytes);                                                       \
        if (allowed != cudaSuccess) return allowed;                                                                  \
        LAUNCH(NAME, grid, 32 * WARPS, bytes, stream, static_cast<const T*>(x), static_cast<const T*>(weight1),      \
               static_cast<const T*>(bias1), static_cast<const T*>(gain1), static_cast<const T*>(shift1),            \
               static_cast<const T*>(weight2), static_cast<const T*>(bias2), static_cast<const T*>(gain2),           \
               static_cast<const T*>(shift2), static_cast<const T*>(weight3), static_cast<const T*>(bias3), lengths, \
               speed, emphasis, pauses, logs, durations, symbols, inputs, longest, epsilon);                         \
        return cudaGetLastError();                                                                                   \
    } while (0)

extern "C" cudaError_t launch_duration_predictor(
    const void* x, const void* weight1, const void* bias1, const void* gain1, const void* shift1, const void* weight2,
    const void* bias2, const void* gain2, const void* shift2, const void* weight3, const void* bias3,
    const int* lengths, const float* speed, const float* emphasis, const int* pauses, float* logs, int* durations,
    int batch, int symbols, int inputs, int hidden, int longest, float epsilon, int type, cudaStream_t stream) {
    if (batch <= 0 || symbols <= 0) return cudaSuccess;
    if (batch > 65535 || inputs <= 0 || inputs % 32 || inputs > 1024) return cudaErrorInvalidValue;
    const dim3 grid(divide_up(symbols, OUTPUTS), batch);
    const int bytes = HALO * (inputs + 8 + hidden + 8) * 2 + ROWS * (hidden + 4) * 4;
    if (type == HALF && hidden == 128) RUN(duration_predictor_f16_128, __half);
    if (type == HALF && hidden == 256) RUN(duration_predictor_f16_256, __half);
    if (type == BFLOAT && hidden == 128) RUN(duration_predictor_bf16_128, __nv_bfloat16);
    if (type == BFLOAT && hidden == 256) RUN(duration_predictor_bf16_256, __nv_bfloat16);
    return cudaErrorInvalidValue;
}
