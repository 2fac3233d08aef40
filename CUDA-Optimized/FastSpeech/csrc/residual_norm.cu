// out = LayerNorm(x + bias + residual) gain + shift, 0 beyond an item's length. One warp a row; the row stays in
// registers as float32 for both passes (mean, then squares about it), so nothing cancels in half precision.
#include "common.cuh"

constexpr int WARPS = 4;
constexpr int LARGEST = 2048;  // channels

// x, residual (may be null), out (B, L, C); bias (may be null), gain, shift (C).
template <typename T, int WIDTH, int VECTORS>
__device__ void normalise(const T* x, const T* bias, const T* residual, const T* gain, const T* shift, T* out,
                          const int* lengths, int rows, int length, int channels, float epsilon) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const size_t start = static_cast<size_t>(row) * channels;
    if (row % length >= item_limit(lengths, row / length, length)) {
        const float nothing[WIDTH] = {};
        for (int channel = lane * WIDTH; channel < channels; channel += 32 * WIDTH)
            store_floats<T, WIDTH>(out + start + channel, nothing);
        return;
    }
    float values[VECTORS][WIDTH];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int channel = (i * 32 + lane) * WIDTH;
        if (channel >= channels) continue;
        load_floats<T, WIDTH>(x + start + channel, values[i]);
        float other[WIDTH];
        if (bias != nullptr) {
            load_floats<T, WIDTH>(bias + channel, other);
            for (int j = 0; j < WIDTH; ++j) values[i][j] += other[j];
        }
        if (residual != nullptr) {
            load_floats<T, WIDTH>(residual + start + channel, other);
            for (int j = 0; j < WIDTH; ++j) values[i][j] += other[j];
        }
        for (int j = 0; j < WIDTH; ++j) sum += values[i][j];
    }
    const float mean = warp_sum(sum) / channels;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if ((i * 32 + lane) * WIDTH >= channels) continue;
        for (int j = 0; j < WIDTH; ++j) squares += (values[i][j] - mean) * (values[i][j] - mean);
    }
    const float scale = rsqrtf(warp_sum(squares) / channels + epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int channel = (i * 32 + lane) * WIDTH;
        if (channel >= channels) continue;
        float gains[WIDTH], shifts[WIDTH];
        load_floats<T, WIDTH>(gain + channel, gains);
        load_floats<T, WIDTH>(shift + channel, shifts);
        for (int j = 0; j < WIDTH; ++j) values[i][j] = (values[i][j] - mean) * scale * gains[j] + shifts[j];
        store_floats<T, WIDTH>(out + start + channel, values[i]);
    }
}

#define DEFINE(NAME, T, WIDTH, VECTORS)                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                         \
        NAME(const T* x, const T* bias, const T* residual, const T* gain, const T* shift, T* out, const int* lengths, \
             int rows, int length, int channels, float epsilon) {                                                    \
        normalise<T, WIDTH, VECTORS>(x, bias, residual, gain, shift, out, lengths, rows, length, channels, epsilon); \
    }
// Up to 512 channels a row takes few registers, beyond that as many as LARGEST needs.
DEFINE(residual_norm_f32, float, 4, 4)
DEFINE(residual_norm_f16, __half, 8, 2)
DEFINE(residual_norm_bf16, __nv_bfloat16, 8, 2)
DEFINE(residual_norm_f32_any, float, 1, LARGEST / 32)
DEFINE(residual_norm_f16_any, __half, 1, LARGEST / 32)
DEFINE(residual_norm_bf16_any, __nv_bfloat16, 1, LARGEST / 32)

#define RUN(NAME, T)                                                                                                  \
    LAUNCH(NAME, grid, 32 * WARPS, 0, stream, static_cast<const T*>(x), static_cast<const T*>(bias),                  \
           static_cast<const T*>(residual), static_cast<const T*>(gain), static_cast<const T*>(shift),                \
           static_cast<T*>(out), lengths, rows, length, channels, epsilon)

extern "C" cudaError_t launch_residual_norm(const void* x, const void* bias, const void* residual, const void* gain,
                                            const void* shift, void* out, const int* lengths, int batch, int length,
                                            int channels, float epsilon, int type, cudaStream_t stream) {
    if (batch <= 0 || length <= 0) return cudaSuccess;
    if (channels <= 0 || channels > LARGEST || static_cast<long long>(batch) * length > 0x7fffffff - WARPS)
        return cudaErrorInvalidValue;
    const int rows = batch * length, grid = divide_up(rows, WARPS);
    const bool whole = channels <= 512 && channels % (type == FLOAT ? 4 : 8) == 0;
    if (type == FLOAT && whole) RUN(residual_norm_f32, float);
    else if (type == FLOAT) RUN(residual_norm_f32_any, float);
    else if (type == HALF && whole) RUN(residual_norm_f16, __half);
    else if (type == HALF) RUN(residual_norm_f16_any, __half);
    else if (type == BFLOAT && whole) RUN(residual_norm_bf16, __nv_bfloat16);
    else if (type == BFLOAT) RUN(residual_norm_bf16_any, __nv_bfloat16);
    else return cudaErrorInvalidValue;
    return cudaGetLastError();
}
