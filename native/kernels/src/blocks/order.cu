// The order in which tiles multiply the bytes of a block. Two neighbouring blocks, the first of them at a whole word, are an
// odd number of words. Four lanes take those in turn, out of UNITS aligned units of 16 bytes; pair k of a piece of eight blocks
// begins at word k of its first unit. What a lane has of a unit in the middle is a word of one block; of the units around it a
// lane has a word in one, and the lane where the pair begins one half in each, as scales have two bytes. So each lane gets
// two words of each block of Q8_0, and one of Q4_0, without reading any twice; and x is put in the same order.

constexpr int COLUMNS = 8, BYTES = FORMAT == 8 ? 34 : 18, WORDS = FORMAT == 8 ? 8 : 4, UNITS = WORDS / 2 + 1;

// Of rows of x: two words that a lane multiplies, and where one of their halves is.
struct Spot {
    int lane, word, half;
};

// Where bytes 2 i and 2 i + 1 of a block go.
__device__ __forceinline__ Spot spot_of(i64 block, int i) {
    int pair = block / 2 % 4, second = block % 2;
    // Halves from the beginning of the pair on; of Q4_0 a byte of weights has two values.
    int at = i % (2 * WORDS) + (second ? 2 * WORDS + 2 : 1), from = at / 2 + pair;
    // The lane where a pair begins has a last half instead of the first one of a word, and the other way round.
    bool split = !second && at / 2 % WORDS == 0;
    return {from % 4, FORMAT == 8 ? from / 4 % 2 ^ 1 : i / 8, split ? at % 2 ^ 1 : at % 2};
}

// How a lane joins its words of two units that only some lanes need.
__device__ __forceinline__ int joined(int lane, int pair, bool second) {
    return lane > pair ? 0x3210 : lane < pair || second ? 0x7654 : 0x5432;
}

// The bits of a float whose last bit is worth 1, so that they and an integer make the bits of their sum.
constexpr int START = 0x4b400000;

// Values of Q4_0 are multiplied by 16, which is exact.
__device__ __forceinline__ float of_products(float scale) { return FORMAT == 8 ? scale : scale / 16; }

// Eights of rows of x of which a lane has neighbouring words, and bytes of a block of NT eights: words, then scales.
constexpr int TWO = NT < 2 ? NT : 2, X_BYTES = NT * (256 + 32);

// Of x for teams of warps: bytes of a block, and of a piece with its scales behind it.
constexpr int X_BLOCK = NT * 256, X_PIECE = COLUMNS * X_BLOCK + COLUMNS / 2 * (NT * 128);

// Where the first eight rows have the scales of a pair of blocks, in a multiplication's first columns: those of two pairs lie
// by turns, so that the next rows are as far as those of bytes.
__device__ __forceinline__ constexpr int x_scales(int pair) { return COLUMNS * X_BLOCK + pair / 2 * (NT * 256) + pair % 2 * 128; }

// Where bytes 2 i and 2 i + 1 of a block go for teams of warps, of which four lanes have every fourth word each from where a pair
// begins on: words of the second block are whole ones; of the first one the first lane joins the first half and the last one.
__device__ __forceinline__ Spot spot_of_pair(i64 block, int i) {
    constexpr int HALVES = 2 * WORDS;
    int half = i % HALVES, at = block % 2 ? half : half == 0 ? 0 : half == HALVES - 1 ? 1 : half + 1;
    return {at / 2 % 4, FORMAT == 8 ? at / 8 : i / 8, at % 2};
}

// Puts a quarter of a row's block to the lanes from `first` on that multiply it, which have the words of TWO rows after one
// another, these as number `at`.
__device__ __forceinline__ void put_words(const Eight& all, i64 block, int quarter, int first, int at, unsigned char* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Spot spot = spot_of(block, quarter * 4 + i);
        int word = ((first + spot.lane) * TWO + at) * 2 + spot.word;
        ((unsigned short*)to)[word * 2 + spot.half] = (unsigned short)(all.words[i / 2] >> 16 * (i % 2));
    }
}
