// Positions added to a sequence, or to the embeddings of symbols, and everything beyond an item's length set to 0.
#include "positions.cuh"

constexpr int THREADS = 256;

// x (B, L, C), or with symbols (B, L) a table (rows, C) of which symbol s takes row s; a symbol that has no row is 0.
template <typename T, int WIDTH>
__device__ void encode(const T* x, const int* symbols, T* out, const int* lengths, int rows, int length, int channels) {
    const int vectors = channels / WIDTH;
    const int place = blockIdx.x * THREADS + threadIdx.x, item = blockIdx.y;
    if (place >= length * vectors) return;
    const int position = place / vectors, channel = place % vectors * WIDTH;
    const size_t row = static_cast<size_t>(item) * length + position;
    float values[WIDTH] = {};
    if (position < item_limit(lengths, item, length)) {
        const int symbol = symbols == nullptr ? 0 : symbols[row];
        if (symbols == nullptr) load_floats<T, WIDTH>(x + row * channels + channel, values);
        else if (symbol >= 0 && symbol < rows)
            load_floats<T, WIDTH>(x + static_cast<size_t>(symbol) * channels + channel, values);
        add_positions<T, WIDTH>(values, position, channel, channels);
    }
    store_floats<T, WIDTH>(out + row * channels + channel, values);
}

#define DEFINE(NAME, T, WIDTH)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
        NAME(const T* x, const int* symbols, T* out, const int* lengths, int rows, int length, int channels) {      \
        encode<T, WIDTH>(x, symbols, out, lengths, rows, length, channels);                                         \
    }
DEFINE(positions_f32, float, 4)
DEFINE(positions_f16, __half, 8)
DEFINE(positions_bf16, __nv_bfloat16, 8)
DEFINE(positions_f32_any, float, 1)
DEFINE(positions_f16_any, __half, 1)
DEFINE(positions_bf16_any, __nv_bfloat16, 1)

#define RUN(NAME, T)                                                                                              \
    LAUNCH(NAME, grid, THREADS, 0, stream, static_cast<const T*>(x), symbols, static_cast<T*>(out), lengths, rows, \
           length, channels)

extern "C" cudaError_t launch_positions(const void* x, const int* symbols, void* out, const int* lengths, int batch,
                                        int rows, int length, int channels, int type, cudaStream_t stream) {
    if (batch <= 0 || length <= 0 || channels <= 0) return cudaSuccess;
    if (batch > 65535) return cudaErrorInvalidValue;
    const bool whole = channels % (type == FLOAT ? 4 : 8) == 0;
    const int width = !whole ? 1 : type == FLOAT ? 4 : 8;
    if (static_cast<long long>(length) * (channels / width) > 0x7fffff00) return cudaErrorInvalidValue;
    const dim3 grid(divide_up(length * (channels / width), THREADS), batch);
    if (type == FLOAT && whole) RUN(positions_f32, float);
    else if (type == FLOAT) RUN(positions_f32_any, float);
    else if (type == HALF && whole) RUN(positions_f16, __half);
    else if (type == HALF) RUN(positions_f16_any, __half);
    else if (type == BFLOAT && whole) RUN(positions_bf16, __nv_bfloat16);
    else if (type == BFLOAT) RUN(positions_bf16_any, __nv_bfloat16);
    else return cudaErrorInvalidValue;
    return cudaGetLastError();
}
