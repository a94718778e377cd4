// A device on the host: runs the kernels for programs that write commands to its standard input. The threads of a block
// are fibers, which change only at barriers, in an order that `seed` draws. So a barrier that is missing shows, an
// access beyond memory or at a wrong address is the sanitizers' to find, and a barrier that not all threads meet is an
// error.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <random>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Variables of a block: `extern` ones are defined below.
#define __shared__ thread_local

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return ((unsigned long long)high << 32 | low) >> (by & 31); }
static unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return ((unsigned long long)high << 32 | low) << (by & 31) >> 32; }
static unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) { return ((unsigned long long)high << 32 | low) >> std::min(by, 32u); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int k = 0; k < 4; ++k) result |= (both >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k;
    return result;
}
template <typename A, typename B> static std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> static std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }

struct {
    unsigned x;
} blockIdx, threadIdx;

constexpr unsigned MOST = 512, WARP = 32;
constexpr size_t STACK = 256 << 10;

enum State { READY, AT_WARP, AT_BLOCK, ENDED };

struct Fiber {
    ucontext_t context;
    State state = ENDED;
};

static Fiber fibers[MOST];
static ucontext_t scheduler;
static std::function<void()> body;
static bool vote = true, voted;
static unsigned given[MOST], shuffled[MOST];

[[noreturn]] static void fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(3);
}

static void wait_in(State state) {
    Fiber &fiber = fibers[threadIdx.x];
    fiber.state = state;
    swapcontext(&fiber.context, &scheduler);
}

static void __syncthreads() { wait_in(AT_BLOCK); }

static bool __syncthreads_and(bool mine) {
    vote = vote && mine;
    wait_in(AT_BLOCK);
    return voted;
}

static unsigned __shfl_down_sync(unsigned, unsigned value, unsigned by) {
    const unsigned thread = threadIdx.x;
    given[thread] = value;
    wait_in(AT_WARP);
    return thread % WARP + by < WARP ? shuffled[thread + by] : value;
}

#include "copy.cu"

constexpr size_t DYNAMIC = 96 << 10;
alignas(128) thread_local u128 chunk[DYNAMIC / sizeof(u128)];
alignas(128) thread_local u32 cells[DYNAMIC / sizeof(u32)];

static void loop() {
    while (true) {
        body();
        wait_in(ENDED);
    }
}

// Lets those of a block go on that no barrier holds any more.
static bool release(unsigned threads) {
    const auto all = [](unsigned begin, unsigned end, State state) {
        return std::all_of(fibers + begin, fibers + end, [=](const Fiber &fiber) { return fiber.state == state; });
    };
    bool some = false;
    for (unsigned warp = 0; warp < threads; warp += WARP)
        if (all(warp, warp + WARP, AT_WARP)) {
            std::copy(given + warp, given + warp + WARP, shuffled + warp);
            for (unsigned thread = warp; thread < warp + WARP; ++thread) fibers[thread].state = READY;
            some = true;
        }
    if (all(0, threads, AT_BLOCK)) {
        voted = vote, vote = some = true;
        for (unsigned thread = 0; thread < threads; ++thread) fibers[thread].state = READY;
    }
    return some;
}

static void run_block(unsigned threads, size_t shared, std::mt19937 &random) {
    memset(chunk, 0xa5, sizeof chunk), memset(cells, 0xa5, sizeof cells);
    std::vector<unsigned> order(threads);
    for (unsigned thread = 0; thread < threads; ++thread) order[thread] = thread, fibers[thread].state = READY;
    do {
        std::shuffle(order.begin(), order.end(), random);
        for (unsigned thread : order) {
            threadIdx.x = thread;
            if (fibers[thread].state == READY) swapcontext(&scheduler, &fibers[thread].context);
        }
    } while (release(threads));
    for (unsigned thread = 0; thread < threads; ++thread)
        if (fibers[thread].state != ENDED) fail("threads wait at a barrier that others do not meet");
    const auto untouched = [=](const void *memory) {
        const char *begin = (const char *)memory;
        return std::all_of(begin + shared, begin + DYNAMIC, [](char byte) { return byte == '\xa5'; });
    };
    if (!untouched(chunk) || !untouched(cells)) fail("a block writes more shared memory than it has");
}

template <typename T> static T taken() {
    T value;
    if (fread(&value, sizeof value, 1, stdin) != 1) exit(0);
    return value;
}

static std::vector<char> bytes(size_t length) {
    std::vector<char> all(length);
    if (fread(all.data(), 1, length, stdin) != length) exit(0);
    return all;
}

template <typename Parameters> static bool called(void *kernel, const std::vector<char> &given) {
    if (given.size() != sizeof(Parameters)) return false;
    Parameters parameters;
    memcpy(&parameters, given.data(), given.size());
    body = [=] { ((void (*)(Parameters))kernel)(parameters); };
    return true;
}

// The name of a kernel, its blocks, threads, bytes of shared memory and seed, and its parameters, known by their size.
static void launch() {
    const std::vector<char> name = bytes(taken<u64>());
    const u64 blocks = taken<u64>(), threads = taken<u64>(), shared = taken<u64>();
    std::mt19937 random(taken<u64>());
    const std::vector<char> parameters = bytes(taken<u64>());
    void *kernel = dlsym(RTLD_DEFAULT, std::string(name.begin(), name.end()).c_str());
    if (!kernel || threads > MOST || threads % WARP || shared > DYNAMIC) fail("there is no such launch");
    if (!called<Flat>(kernel, parameters) && !called<Tile>(kernel, parameters) && !called<Box>(kernel, parameters) && !called<Pieces>(kernel, parameters) &&
        !called<Casts>(kernel, parameters))
        fail("there are no such parameters");
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_block(threads, shared, random);
}

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, length)
#endif

// Memory with these bytes, which begins `beyond` bytes after a multiple of 16. What lies around it is not to be touched.
static char *allocate(std::vector<char *> &all) {
    const u64 beyond = taken<u64>();
    const std::vector<char> content = bytes(taken<u64>());
    void *allocated;
    if (posix_memalign(&allocated, 16, beyond + content.size())) fail("there is no memory");
    char *memory = (char *)allocated;
    all.push_back(memory);
    ASAN_POISON_MEMORY_REGION(memory, beyond);
    std::copy(content.begin(), content.end(), memory + beyond);
    return memory + beyond;
}

int main() {
    char *stacks = (char *)malloc(MOST * STACK);
    for (unsigned thread = 0; thread < MOST; ++thread) {
        ucontext_t &context = fibers[thread].context;
        getcontext(&context);
        context.uc_stack = {stacks + thread * STACK, 0, STACK};
        makecontext(&context, loop, 0);
    }
    std::vector<char *> all;
    for (;; fflush(stdout)) switch (taken<u64>()) {
        case 'm': {
            const char *memory = allocate(all);
            fwrite(&memory, sizeof memory, 1, stdout);
            break;
        }
        case 'l':
            launch();
            putchar('d');
            break;
        case 'r': {
            const char *memory = (const char *)taken<u64>();
            fwrite(memory, 1, taken<u64>(), stdout);
            break;
        }
        default:
            for (char *memory : all) free(memory);
            all.clear();
        }
}
