// Copies to shared memory that a barrier there counts: its phase, of parity 0 and 1 in turn, ends when as many threads have
// arrived as it was opened for, and what they copied has. From compute capability 8 on; boxes and bytes from 9 on.

typedef unsigned long long Barrier;

__device__ __forceinline__ void open(Barrier* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

// Whoever opened barriers says so before the block's next barrier, for what copies by itself.
__device__ __forceinline__ void opened() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(const Barrier* barrier, int parity) {
    int over;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred over; mbarrier.try_wait.parity.shared.b64 over, [%1], %2; selp.b32 %0, 1, 0, over; }"
#else
        asm volatile("{ .reg .pred over; mbarrier.test_wait.parity.shared.b64 over, [%1], %2; selp.b32 %0, 1, 0, over; }"
#endif
                     : "=r"(over) : "r"(address(barrier)), "r"(parity) : "memory");
    } while (!over);
}

// A thread copies SIZE bytes, or zeros.
template <int SIZE>
__device__ __forceinline__ void copy_piece(void* to, const void* from, bool there) {
    if constexpr (SIZE == 2)
        *(unsigned short*)to = there ? *(const unsigned short*)from : 0;
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address(to)), "l"(from), "n"(SIZE),
                     "r"(there ? SIZE : 0) : "memory");
}

// Arrives when all that the thread copied has.
template <int SIZE>
__device__ __forceinline__ void arrive_copied(Barrier* barrier) {
    if constexpr (SIZE == 2) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        arrive(barrier);
    } else {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(barrier)) : "memory");
    }
}

#if __CUDA_ARCH__ >= 900
// Arrives for so many bytes that are copied.
__device__ __forceinline__ void expect(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

// Part of a matrix that the host describes, from an element of a row on; what is past its ends becomes zeros. What is read only
// ONCE pushes nothing else out of the cache.
template <bool ONCE>
__device__ __forceinline__ void copy_box(void* to, const void* matrix, int element, int row, Barrier* barrier) {
#define COPY_BOX "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    if constexpr (ONCE)
        asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; "
                     COPY_BOX ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], first; }"
                     ::"r"(address(to)), "l"(matrix), "r"(element), "r"(row), "r"(address(barrier)) : "memory");
    else
        asm volatile(COPY_BOX " [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(address(to)), "l"(matrix), "r"(element), "r"(row), "r"(address(barrier)) : "memory");
#undef COPY_BOX
}

// Neighbouring bytes, in whole pieces of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, unsigned bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

// A number for the same place of a block of the cluster, whose barrier counts its bytes.
__device__ __forceinline__ void send(unsigned* place, unsigned number, int block, Barrier* barrier) {
    asm volatile("{ .reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %3; mapa.shared::cluster.u32 there, %2, %3; "
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [there]; }"
                 ::"r"(address(place)), "r"(number), "r"(address(barrier)), "r"(block) : "memory");
}
#endif
