// Tensor cores and asynchronous copies, a warp or a thread at a time. cuda_host.h has each of them for a CPU, with the
// same places of values in registers.
#pragma once
#include "common.cuh"

#ifndef FASTSPEECH_HOST
// 16 bytes from global to shared memory, or 16 zero bytes where nothing is there to read.
__device__ inline void copy_async(void* target, const void* source, bool there) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(source), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most PENDING groups of this thread's copies are under way.
template <int PENDING> __device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// What another block wrote in this launch, past this processor's own cache; not moved over fences and barriers.
__device__ inline float4 read_shared(const float* source) {
    float4 value;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(source)
                 : "memory");
    return value;
}

// Four 8 x 8 matrices of 16-bit values; lane 8 m + r gives the address of row r of matrix m. Lane l receives values
// 2 (l % 4) and the next of row l / 4 of each; transposed: of column l / 4.
__device__ inline void load_matrices(uint32_t (&target)[4], const void* row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(target[0]), "=r"(target[1]), "=r"(target[2]), "=r"(target[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void load_transposed(uint32_t (&target)[4], const void* row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(target[0]), "=r"(target[1]), "=r"(target[2]), "=r"(target[3])
                 : "r"(address)
                 : "memory");
}

// sum (16 x 8) += a (16 x 16) b (16 x 8). With g = lane / 4 and t = lane % 4, sum holds (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1); a the pairs from (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b the pairs of
// rows from (2t, g), (2t + 8, g).
template <typename T>
__device__ inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void multiply<__half>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<__nv_bfloat16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

constexpr int ROW = 64;             // 16-bit values of a row in shared memory: 128 bytes, once through all banks
constexpr int CHUNKS = ROW / 8;     // of 16 bytes

// Where 16-byte chunk `chunk` of row `row` lies: permuted, so that eight rows of one chunk are in eight places.
__device__ inline int swizzled(int row, int chunk) { return row * ROW + ((chunk ^ (row & 7)) * 8); }
