// Types, 16-byte vectors and reductions that the kernels share.
//
// With FASTSPEECH_HOST the same files compile as C++ for a CPU, where cuda_host.h plays the device (for tests).
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef FASTSPEECH_HOST
#include "cuda_host.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define DYNAMIC_SHARED(type, name)                              \
    extern __shared__ __align__(128) unsigned char name##_raw[]; \
    type* name = reinterpret_cast<type*>(name##_raw)
#define LAUNCH(kernel, grid, block, shared, stream, ...) kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#define ALLOW_SHARED(kernel, bytes) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)
// A place in memory as one of another type; on a CPU, checked to be at a multiple of that one's size.
template <typename V, typename T> __device__ inline V* as(T* place) { return reinterpret_cast<V*>(place); }
#endif

// How callers name a type of the activations.
enum DataType { FLOAT = 0, HALF = 1, BFLOAT = 2 };

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T> __device__ inline T from_float(float value);
template <> __device__ inline float from_float<float>(float value) { return value; }
template <> __device__ inline __half from_float<__half>(float value) { return __float2half_rn(value); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// WIDTH values that are read and written at once; an address must be a multiple of the size.
template <typename T, int WIDTH> struct alignas(sizeof(T) * WIDTH) Vector {
    T values[WIDTH];
};

template <typename T, int WIDTH> __device__ inline void load_floats(const T* source, float (&values)[WIDTH]) {
    const Vector<T, WIDTH> packed = *as<const Vector<T, WIDTH>>(source);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = to_float(packed.values[i]);
}

template <typename T, int WIDTH> __device__ inline void store_floats(T* target, const float (&values)[WIDTH]) {
    Vector<T, WIDTH> packed;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) packed.values[i] = from_float<T>(values[i]);
    *as<Vector<T, WIDTH>>(target) = packed;
}

// Two neighbouring values in one register, the first in the low half.
template <typename T> __device__ inline uint32_t pack_pair(float low, float high) {
    Vector<T, 2> pair;
    pair.values[0] = from_float<T>(low);
    pair.values[1] = from_float<T>(high);
    return *as<uint32_t>(&pair);
}

// Over the 32 lanes of a warp; every lane has the result.
__device__ inline float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Frames or symbols of an item that count: all where no lengths are given.
__device__ inline int item_limit(const int* lengths, int item, int length) {
    if (lengths == nullptr) return length;
    const int limit = lengths[item];
    return limit < 0 ? 0 : (limit < length ? limit : length);
}

__host__ __device__ inline int divide_up(int value, int by) { return (value + by - 1) / by; }
