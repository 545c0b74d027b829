// Weights in flight: 16 bytes at a time from rows of blocks, at any even address, to shared memory.

__device__ __forceinline__ const unsigned char* rounded_down(const unsigned char* at) {
    return (const unsigned char*)((unsigned long long)at & ~15ull);
}

// Copies 16 bytes, those of them before `end`; the rest are zeros.
__device__ __forceinline__ void copy16(unsigned char* to, const unsigned char* from, const unsigned char* end) {
    if (from + 16 <= end) return copy16(to, from);
    for (int i = 0; i < 16; i += 2)
        *(unsigned short*)(to + i) = from + i < end ? *(const unsigned short*)(from + i) : 0;
}

// The place of a block in a stage, `at` bytes on: its first whole word, and the bits of that word before the block.
struct Where {
    int offset, shift;
};

__device__ __forceinline__ Where where(int at) { return {at & ~3, (at & 2) * 8}; }

// Keeps a number in a register that the compiler would otherwise recompute each time.
__device__ __forceinline__ int kept(int value) {
    asm volatile("" : "+r"(value));
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
