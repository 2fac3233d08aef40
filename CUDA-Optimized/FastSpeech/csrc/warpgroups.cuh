// Products of a warpgroup (four warps) from shared memory on Hopper: wgmma of PTX, which sm_90a alone has. cuda_host.h
// has them for a CPU. Elsewhere kernels that would use them take the products of single warps.
#pragma once
#include <type_traits>

#include "tensor_cores.cuh"

#ifdef FASTSPEECH_HOST
constexpr bool HAS_WARPGROUPS = true;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool HAS_WARPGROUPS = true;
#else
constexpr bool HAS_WARPGROUPS = false;
#endif

constexpr int SWIZZLE = 1024;  // bytes after which the permutation of `swizzled` repeats: where tiles must begin

#ifndef FASTSPEECH_HOST
// What threads have copied into shared memory becomes visible to the products of the barrier's other side.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int PENDING> __device__ inline void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

// Rows of 128 bytes, permuted by 16 bytes within each 8 rows (PTX ISA, matrix descriptors: 128-byte swizzle, 1024 bytes
// from one 8 rows to the next).
__device__ inline uint64_t describe(const void* tile) {
    const uint64_t address = __cvta_generic_to_shared(tile);
    return (address & 0x3ffff) >> 4 | 1ull << 16 | static_cast<uint64_t>(SWIZZLE >> 4) << 32 | 1ull << 62;
}

#define SUMS4(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define SUMS16(n) SUMS4(n), SUMS4(n + 1), SUMS4(n + 2), SUMS4(n + 3)
#define NAMES_32                                                                                                    \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "    \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define NAMES_64                                                                                                    \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "    \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "     \
    "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define GROUP_PRODUCT(SHAPE, TYPE, NAMES, A, B)                                                                   \
    "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " NAMES \
    ", " A ", " B ", add, 1, 1, 0, 0;\n}\n"

// sums (64 rows x 8 TILES) += a (64 x 16) b (8 TILES x 16)^T: of the warpgroup's rows `a` and the rows `b` of a block,
// the 16 values number `step`. Warp w has rows 16 w to 16 w + 15; within them places are those of `multiply`.
template <typename T, int TILES>
__device__ inline void multiply_group(float (&sums)[TILES][4], const T* a, const T* b, int step) {
    static_assert(TILES == 8 || TILES == 16, "64 or 128 columns");
    const uint64_t left = describe(a) + step * 2, right = describe(b) + step * 2;  // in units of 16 bytes
    if constexpr (TILES == 8 && std::is_same_v<T, __half>)
        asm volatile(GROUP_PRODUCT("m64n64k16", "f16", NAMES_32, "%32", "%33")
                     : SUMS16(0), SUMS16(4) : "l"(left), "l"(right));
    else if constexpr (TILES == 8)
        asm volatile(GROUP_PRODUCT("m64n64k16", "bf16", NAMES_32, "%32", "%33")
                     : SUMS16(0), SUMS16(4) : "l"(left), "l"(right));
    else if constexpr (std::is_same_v<T, __half>)
        asm volatile(GROUP_PRODUCT("m64n128k16", "f16", NAMES_64, "%64", "%65")
                     : SUMS16(0), SUMS16(4), SUMS16(8), SUMS16(12) : "l"(left), "l"(right));
    else
        asm volatile(GROUP_PRODUCT("m64n128k16", "bf16", NAMES_64, "%64", "%65")
                     : SUMS16(0), SUMS16(4), SUMS16(8), SUMS16(12) : "l"(left), "l"(right));
}
#else
__device__ inline void begin_products() {}
__device__ inline void commit_products() {}
template <int PENDING> __device__ inline void wait_products() {}
template <typename T, int TILES> __device__ inline void multiply_group(float (&)[TILES][4], const T*, const T*, int) {}
#endif
#endif
