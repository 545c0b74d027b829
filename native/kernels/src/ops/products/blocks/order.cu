// The order in which tiles multiply the bytes of a block. Two adjacent blocks, the first aligned to a word, are an odd
// number of words. Four lanes take these in turn, out of UNITS aligned units of 16 bytes; pair k of a piece of eight
// blocks begins at word k of its first unit. A lane's word in a middle unit belongs to one block. Of the two units
// around it, a lane has a word in one. The lane where the pair begins has a half in each, because scales have two
// bytes. So each lane gets two words of each block of Q8_0, and one of Q4_0, without reading any word twice. x is
// stored in the same order.

constexpr int WORDS = FORMAT == 8 ? 8 : 4, UNITS = WORDS / 2 + 1;

// The place of two bytes in rows of x: the lane, which of its two words, and which half of the word.
struct Spot {
    int lane, word, half;
};

// The place of bytes 2 i and 2 i + 1 of a block.
__device__ __forceinline__ Spot spot_of(i64 block, int i) {
    int pair = block / 2 % 4, second = block % 2;
    // Halves of words, counted from the beginning of the pair. A byte of weights in Q4_0 has two values.
    int at = i % (2 * WORDS) + (second ? 2 * WORDS + 2 : 1), from = at / 2 + pair;
    // The lane where a pair begins has the halves of its split word swapped.
    bool split = !second && at / 2 % WORDS == 0;
    return {from % 4, FORMAT == 8 ? from / 4 % 2 ^ 1 : i / 8, split ? at % 2 ^ 1 : at % 2};
}

// The byte selector with which a lane joins its words of two units.
__device__ __forceinline__ int joined(int lane, int pair, bool second) {
    return lane > pair ? 0x3210 : lane < pair || second ? 0x7654 : 0x5432;
}

// The bits of a float whose last bit is worth 1: adding an integer to them gives the bits of the float sum.
constexpr int START = 0x4b400000;

// Values of Q4_0 are multiplied by 16; this undoes it exactly.
__device__ __forceinline__ float of_products(float scale) { return FORMAT == 8 ? scale : scale / 16; }

// Eights of rows of x whose words a lane has side by side, and bytes of a block of NT eights: words, then scales.
constexpr int TWO = NT < 2 ? NT : 2, X_BYTES = NT * (256 + 32);

// Bytes of x for teams of warps: of a block, and of a piece, whose scales follow its blocks.
constexpr int X_BLOCK = NT * 256, X_PIECE = COLUMNS * X_BLOCK + COLUMNS / 2 * (NT * 128);

// The offset of the scales of a pair of blocks for the first eight rows, as the first columns of a multiplication. Two
// pairs alternate, so that the distance to the next eight rows is that of bytes.
__device__ __forceinline__ constexpr int x_scales(int pair) { return COLUMNS * X_BLOCK + pair / 2 * (NT * 256) + pair % 2 * 128; }

// The place of bytes 2 i and 2 i + 1 of a block, for teams of warps. Four lanes take every fourth word of a pair. Words
// of the second block are whole. In the first block, the first lane joins the first half and the last one.
__device__ __forceinline__ Spot spot_of_pair(i64 block, int i) {
    constexpr int HALVES = 2 * WORDS;
    int half = i % HALVES, at = block % 2 ? half : half == 0 ? 0 : half == HALVES - 1 ? 1 : half + 1;
    return {at / 2 % 4, FORMAT == 8 ? at / 8 : i / 8, at % 2};
}

// Writes a quarter of a block of a row for the lanes that multiply it, from lane `first` on. Each lane has the words of
// TWO rows side by side, of which this row is number `at`.
__device__ __forceinline__ void put_words(const Eight& all, i64 block, int quarter, int first, int at, unsigned char* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Spot spot = spot_of(block, quarter * 4 + i);
        int word = ((first + spot.lane) * TWO + at) * 2 + spot.word;
        ((unsigned short*)to)[word * 2 + spot.half] = (unsigned short)(all.words[i / 2] >> 16 * (i % 2));
    }
}
