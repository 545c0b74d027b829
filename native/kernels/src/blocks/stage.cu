// Weights on their way: 16 bytes at a time from where rows of blocks lie, which is any even address, to shared memory.

constexpr int BYTES = FORMAT == 8 ? 34 : 18;

__device__ __forceinline__ const unsigned char* rounded_down(const unsigned char* at) {
    return (const unsigned char*)((unsigned long long)at & ~15ull);
}

// Copies 16 bytes.
__device__ __forceinline__ void copy16(unsigned char* to, const unsigned char* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

// The same of what there is before `end`, and zeros.
__device__ __forceinline__ void copy16(unsigned char* to, const unsigned char* from, const unsigned char* end) {
    if (from + 16 <= end) return copy16(to, from);
    for (int i = 0; i < 16; i += 2)
        *(unsigned short*)(to + i) = from + i < end ? *(const unsigned short*)(from + i) : 0;
}

__device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the latest LEFT groups of this thread are there.
template <int LEFT>
__device__ __forceinline__ void arrived() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
    __syncwarp();
}

// What was queued before is done: until then only weights may be read.
__device__ __forceinline__ void others_are_done() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Where a block lies in a stage, `at` bytes on: its first whole word, and what of that was before.
struct Where {
    int offset, shift;
};

__device__ __forceinline__ Where where(int at) { return {at & ~3, (at & 2) * 8}; }

// Keeps a number that would else be computed again each time.
__device__ __forceinline__ int kept(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ const unsigned char* kept(const unsigned char* value) {
    asm volatile("" : "+l"(value));
    return value;
}

// A block in shared memory.
struct Block {
    const unsigned* words;
    int shift;

    __device__ __forceinline__ Block(const unsigned char* stage, Where where)
        : words((const unsigned*)(stage + where.offset)), shift(where.shift) {}
    __device__ __forceinline__ float scale() const { return widen(f16{(unsigned short)(words[0] >> shift)}); }
    // Word i of its bytes, which begin two bytes on.
    __device__ __forceinline__ unsigned word(int i) const {
        return __funnelshift_rc(words[i], words[i + 1], shift + 16);
    }
};
