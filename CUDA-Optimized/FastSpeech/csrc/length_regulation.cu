// Length regulation (Ren et al. 2019, 3.2): row t of x is repeated durations[t] times; 0 beyond the end; with the
// positions of the frames added where asked for.
//
// Every block sums up its item's durations again (they are few) and notes the symbol of each of its FRAMES frames; then
// rows are copied, 16 bytes a thread. Nothing is allocated, and no length is too long: symbols come in chunks.
#include "positions.cuh"

constexpr int FRAMES = 16;
constexpr int THREADS = 256;
constexpr int LONGEST = 0x7fffffff / (THREADS + 1);  // frames: sums of a chunk of symbols stay within an int

// The sum of the values of this and all threads before it; `total` of all threads.
__device__ inline int block_prefix_sum(int value, int& total) {
    __shared__ int sums[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, value, offset);
        if (lane >= offset) value += before;
    }
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    int base = 0;
    total = 0;
#pragma unroll
    for (int other = 0; other < THREADS / 32; ++other) {
        if (other < warp) base += sums[other];
        total += sums[other];
    }
    __syncthreads();  // sums may be written again
    return value + base;
}

// x (B, T, C), durations (B, T), out (B, size, C), lengths (B): min(frames, size). An item without any frames has
// `least` of its first symbol. Negative durations count as 0, and no sum of durations is too large.
template <typename T, int WIDTH>
__device__ void regulate(const T* x, const int* durations, T* out, int* lengths, int symbols, int channels, int size,
                         int least, int with_positions) {
    __shared__ int symbol_of[FRAMES];
    const int item = blockIdx.y, first = blockIdx.x * FRAMES, thread = threadIdx.x;
    if (thread < FRAMES) symbol_of[thread] = -1;
    __syncthreads();
    int before = 0;
    for (int start = 0; start < symbols; start += THREADS) {
        const int symbol = start + thread;
        int count = symbol < symbols ? durations[static_cast<size_t>(item) * symbols + symbol] : 0;
        count = count < 0 ? 0 : (count < size ? count : size);  // what is beyond the end does not matter
        int total;
        const int end = before + block_prefix_sum(count, total);
        const int from = end - count > first ? end - count : first;
        const int to = end < first + FRAMES ? end : first + FRAMES;
        for (int frame = from; frame < to; ++frame) symbol_of[frame - first] = symbol;
        before = before + total < size ? before + total : size;
    }
    __syncthreads();
    if (before == 0) {
        if (thread < FRAMES && first + thread < least) symbol_of[thread] = 0;
        before = least;
        __syncthreads();
    }
    if (blockIdx.x == 0 && thread == 0) lengths[item] = before < size ? before : size;
    const int vectors = channels / WIDTH;
    for (int place = thread; place < FRAMES * vectors; place += THREADS) {
        const int frame = place / vectors, channel = place % vectors * WIDTH;
        if (first + frame >= size) break;
        float values[WIDTH] = {};
        if (symbol_of[frame] >= 0) {
            load_floats<T, WIDTH>(x + (static_cast<size_t>(item) * symbols + symbol_of[frame]) * channels + channel,
                                  values);
            if (with_positions) add_positions<T, WIDTH>(values, first + frame, channel, channels);
        }
        store_floats<T, WIDTH>(out + (static_cast<size_t>(item) * size + first + frame) * channels + channel, values);
    }
}

#define DEFINE(NAME, T, WIDTH)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
        NAME(const T* x, const int* durations, T* out, int* lengths, int symbols, int channels, int size, int least, \
             int with_positions) {                                                                                   \
        regulate<T, WIDTH>(x, durations, out, lengths, symbols, channels, size, least, with_positions);              \
    }
DEFINE(length_regulation_f32, float, 4)
DEFINE(length_regulation_f16, __half, 8)
DEFINE(length_regulation_bf16, __nv_bfloat16, 8)
DEFINE(length_regulation_f32_any, float, 1)
DEFINE(length_regulation_f16_any, __half, 1)
DEFINE(length_regulation_bf16_any, __nv_bfloat16, 1)

#define RUN(NAME, T)                                                                                                \
    LAUNCH(NAME, grid, THREADS, 0, stream, static_cast<const T*>(x), durations, static_cast<T*>(out), lengths,         \
           symbols, channels, size, least, with_positions)

extern "C" cudaError_t launch_length_regulation(const void* x, const int* durations, void* out, int* lengths, int batch,
                                                int symbols, int channels, int size, int least, int with_positions,
                                                int type, cudaStream_t stream) {
    if (batch <= 0 || size <= 0 || channels <= 0) return cudaSuccess;
    if (batch > 65535 || size > LONGEST) return cudaErrorInvalidValue;
    if (symbols <= 0) least = 0;
    const dim3 grid(divide_up(size, FRAMES), batch);
    const bool whole = channels % (type == FLOAT ? 4 : 8) == 0;
    if (type == FLOAT && whole) RUN(length_regulation_f32, float);
    else if (type == FLOAT) RUN(length_regulation_f32_any, float);
    else if (type == HALF && whole) RUN(length_regulation_f16, __half);
    else if (type == HALF) RUN(length_regulation_f16_any, __half);
    else if (type == BFLOAT && whole) RUN(length_regulation_bf16, __nv_bfloat16);
    else if (type == BFLOAT) RUN(length_regulation_bf16_any, __nv_bfloat16);
    else return cudaErrorInvalidValue;
    return cudaGetLastError();
}
