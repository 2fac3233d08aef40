// A CUDA device played by one thread of a CPU, for tests of the kernels' arithmetic, indices and synchronisation.
//
// Every thread of a block is a fiber; fibers take turns at barriers, shuffles and matrix instructions, which meet as on
// a device. Asynchronous copies happen when they are waited for and not before; shared memory starts as garbage, so
// that what is read too early shows. Registers of the tensor cores' fragments have the places that the PTX
// manual gives.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct __half {
    _Float16 value;
};
struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace device {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 256 << 10;

struct Copy {
    void* target;
    const void* source;
    bool there;
};

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool started = false, done = false;
    std::vector<char> stack = std::vector<char>(STACK);
    std::vector<std::vector<Copy>> copies;  // groups under way; the last one is open
    bool shown_to_products = false;         // what it has copied so far
};

struct Meeting {
    unsigned arrived = 0, turn = 0;
};

struct Warp {
    Meeting meeting;
    uint32_t slots[2][WARP][8];   // what lanes show each other, in two places in turns
    unsigned calls[WARP] = {};    // per lane, which of the two is next
    const void* rows[2][WARP];
};

inline dim3 blockIdx_, gridDim_;
inline dim3 threadIdx_;
inline unsigned threads, current, idle;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Meeting all;
inline std::vector<unsigned char> shared;
inline jmp_buf host_place;
inline const std::function<void()>* body;
inline bool backwards = false;  // blocks, and threads of a block, take turns from the last to the first
inline unsigned last_launch[5];  // grid, threads, bytes of shared memory

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "cuda_host: %s (block %u %u %u, thread %u)\n", what, blockIdx_.x, blockIdx_.y, blockIdx_.z,
                 current);
    std::abort();
}


// On to the next thread that has not ended; the host goes on when there is none.
inline void go_on() {
    unsigned next = current;
    for (unsigned tried = 0; tried < threads; ++tried) {
        next = (next + (backwards ? threads - 1 : 1)) % threads;
        if (!fibers[next].done) {
            current = next;
            threadIdx_ = dim3(next);
            Fiber& fiber = fibers[next];
            if (fiber.started) _longjmp(fiber.place, 1);
            fiber.started = true;
            setcontext(&fiber.context);
        }
    }
    _longjmp(host_place, 1);
}

inline void yield() {
    if (_setjmp(fibers[current].place) == 0) go_on();
}

inline void meet(Meeting& meeting, unsigned expected) {
    const unsigned turn = meeting.turn;
    if (++meeting.arrived == expected) {
        meeting.arrived = 0;
        ++meeting.turn;
        idle = 0;
        return;
    }
    while (meeting.turn == turn) {
        if (++idle > 4 * threads) fail("threads wait for others that never come");
        yield();
    }
}

inline void enter() {
    (*body)();
    Fiber& fiber = fibers[current];
    for (const auto& group : fiber.copies)
        if (!group.empty()) fail("a thread ended with copies under way");
    fiber.done = true;
    idle = 0;
    go_on();
}

inline void run_block() {
    std::memset(shared.data(), 0xff, shared.size());
    all = {};
    warps.assign((threads + WARP - 1) / WARP, Warp());
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.started = fiber.done = false;
        fiber.copies.assign(1, {});
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    current = threads - 1;
    idle = 0;
    if (_setjmp(host_place) == 0) go_on();
}

// Bytes of shared memory that a kernel may have after `ALLOW_SHARED`; 48 KiB without.
inline std::map<std::string, size_t> allowed;

inline void launch(const char* name, dim3 grid, unsigned count, size_t bytes, const std::function<void()>& kernel) {
    const unsigned said[5] = {grid.x, grid.y, grid.z, count, static_cast<unsigned>(bytes)};
    std::memcpy(last_launch, said, sizeof said);
    const auto may = allowed.find(name);
    if (bytes > (may == allowed.end() ? 48 << 10 : may->second)) fail("more shared memory than was asked for");
    if (bytes > 99 << 10) fail("more shared memory than some of these GPUs have");
    if (count > 1024 || grid.y > 65535 || grid.z > 65535) fail("a grid or block larger than there are");
    gridDim_ = grid;
    threads = count;
    shared.assign(bytes + 128, 0xff);
    body = &kernel;
    const size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
    for (size_t turn = 0; turn < blocks; ++turn) {
        const size_t block = backwards ? blocks - 1 - turn : turn;
        blockIdx_ = dim3(block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y);
        run_block();
    }
}

inline void* dynamic_shared() {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(shared.data()) + 127) / 128 * 128);
}

// Each lane shows COUNT values; when all have, `take` reads what others showed.
template <int COUNT> inline uint32_t (*show(const uint32_t* values, const void* row = nullptr))[8] {
    Warp& warp = warps[current / WARP];
    const unsigned lane = current % WARP, place = warp.calls[lane]++ % 2;
    std::memcpy(warp.slots[place][lane], values, COUNT * 4);
    warp.rows[place][lane] = row;
    meet(warp.meeting, WARP);
    return warp.slots[place];
}

inline const void** rows_shown() {
    Warp& warp = warps[current / WARP];
    return warp.rows[(warp.calls[current % WARP] - 1) % 2];
}

}  // namespace device

// For tests: what depends on the order of threads, though nothing should, shows when it is turned round.
extern "C" inline __attribute__((used)) void host_turn_round(int backwards) { device::backwards = backwards; }

// For tests of other ways to launch: what the last launch was.
extern "C" inline __attribute__((used)) const unsigned* host_last_launch() { return device::last_launch; }

#define threadIdx device::threadIdx_
#define blockIdx device::blockIdx_
#define gridDim device::gridDim_
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(device::dynamic_shared())
#define LAUNCH(kernel, grid, block, bytes, stream, ...) \
    ((void)(stream), device::launch(#kernel, grid, block, bytes, [&] { kernel(__VA_ARGS__); }))
#define ALLOW_SHARED(kernel, bytes) (device::allowed[#kernel] = bytes, cudaSuccess)

template <typename V, typename T> inline V* as(T* place) {
    if (reinterpret_cast<uintptr_t>(place) % alignof(V)) device::fail("a vector that is not at a multiple of its size");
    return reinterpret_cast<V*>(place);
}

inline void __syncthreads() { device::meet(device::all, device::threads); }
inline void __threadfence() {}
inline int atomicAdd(int* address, int value) {
    const int before = *address;
    *address += value;
    return before;
}
inline float4 read_shared(const float* source) { return *as<const float4>(source); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <typename V> inline V shuffled(V value, unsigned lane) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = device::show<1>(&bits)[lane][0];
    std::memcpy(&value, &bits, 4);
    return value;
}
template <typename V> inline V __shfl_xor_sync(unsigned, V value, int mask) {
    return shuffled(value, device::current % 32 ^ mask);
}
template <typename V> inline V __shfl_up_sync(unsigned, V value, int by) {
    const unsigned lane = device::current % 32;
    return shuffled(value, lane >= static_cast<unsigned>(by) ? lane - by : lane);
}

inline void copy_async(void* target, const void* source, bool there) {
    if (reinterpret_cast<uintptr_t>(target) % 16 || reinterpret_cast<uintptr_t>(source) % 16)
        device::fail("a copy of 16 bytes that is not at a multiple of 16");
    device::fibers[device::current].copies.back().push_back({target, source, there});
}
inline void commit_copies() { device::fibers[device::current].copies.emplace_back(); }
template <int PENDING> inline void wait_copies() {
    device::fibers[device::current].shown_to_products = false;
    auto& copies = device::fibers[device::current].copies;
    while (copies.size() > PENDING + 1) {  // the open group is never waited for
        for (const device::Copy& copy : copies.front()) {
            if (copy.there) std::memcpy(copy.target, copy.source, 16);
            else std::memset(copy.target, 0, 16);
        }
        copies.erase(copies.begin());
    }
}

inline void load_matrices_as(uint32_t (&target)[4], const void* row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16) device::fail("a row of a matrix that is not at a multiple of 16");
    const uint32_t nothing = 0;
    device::show<1>(&nothing, row);
    const void** rows = device::rows_shown();
    const unsigned lane = device::current % 32, group = lane / 4, pair = lane % 4 * 2;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        uint16_t values[2];
        for (unsigned i = 0; i < 2; ++i) {
            const unsigned from = transposed ? pair + i : group, column = transposed ? group : pair + i;
            values[i] = static_cast<const uint16_t*>(rows[matrix * 8 + from])[column];
        }
        target[matrix] = values[0] | static_cast<uint32_t>(values[1]) << 16;
    }
}
inline void load_matrices(uint32_t (&target)[4], const void* row) { load_matrices_as(target, row, false); }
inline void load_transposed(uint32_t (&target)[4], const void* row) { load_matrices_as(target, row, true); }

inline float fragment_value(uint32_t pair, int index, __half*) {
    const uint16_t bits = static_cast<uint16_t>(pair >> 16 * index);
    __half value;
    std::memcpy(&value, &bits, 2);
    return __half2float(value);
}
inline float fragment_value(uint32_t pair, int index, __nv_bfloat16*) {
    return __bfloat162float({static_cast<uint16_t>(pair >> 16 * index)});
}

template <typename T> inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto shown = device::show<6>(own);
    T* const kind = nullptr;
    const unsigned lane = device::current % 32;
    for (unsigned j = 0; j < 4; ++j) {
        const unsigned row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
        double total = sum[j];
        for (unsigned k = 0; k < 16; ++k) {
            const float left = fragment_value(shown[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2, kind);
            total += static_cast<double>(left) * fragment_value(shown[column * 4 + k % 8 / 2][4 + k / 8], k % 2, kind);
        }
        sum[j] = static_cast<float>(total);
    }
}

inline void show_to_products() { device::fibers[device::current].shown_to_products = true; }
inline void begin_products() {}
inline void commit_products() {}
template <int PENDING> inline void wait_products() {}
// By each thread for its own places; what is read must have been copied, shown and waited for, as for any thread.
template <typename T, int TILES> inline void multiply_group(float (&sums)[TILES][4], const T* a, const T* b, int step) {
    if (reinterpret_cast<uintptr_t>(a) % 1024 || reinterpret_cast<uintptr_t>(b) % 1024)
        device::fail("a warpgroup's tile that is not at a multiple of 1024");
    if (!device::fibers[device::current].shown_to_products) device::fail("products of what was not shown to them");
    const unsigned lane = device::current % 32, warp = device::current / 32 % 4;
    for (unsigned tile = 0; tile < TILES; ++tile)
        for (unsigned j = 0; j < 4; ++j) {
            const unsigned row = warp * 16 + lane / 4 + j / 2 * 8, column = tile * 8 + lane % 4 * 2 + j % 2;
            double total = sums[tile][j];
            for (unsigned k = 0; k < 16; ++k) {
                const unsigned chunk = step * 2 + k / 8;  // of 16 bytes, permuted by the row as the hardware reads it
                const T left = a[row * 64 + (chunk ^ row % 8) * 8 + k % 8];
                const T right = b[column * 64 + (chunk ^ column % 8) * 8 + k % 8];
                total += static_cast<double>(to_float(left)) * to_float(right);
            }
            sums[tile][j] = static_cast<float>(total);
        }
}
