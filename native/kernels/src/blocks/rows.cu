// Rows of x made ready for products that do not do it themselves. TILE is 1 for tiles of 8 NT rows and weights of FORMAT, 2 for
// the same where warps multiply in teams, and 0 for walks.

struct Params {
    const STORAGE* x;
    unsigned char* ready;
    i64 rows, blocks;
    i64 given;   // blocks of a row of x; those after them are zeros
    int offset;  // by how much weights are too large
};

#if TILE == 1
// For tiles, NT eights of rows have a block together: the words of two eights after one another in the order of the lanes that
// multiply them, and behind all of these the scales of two rows of each eight after one another.
__device__ __forceinline__ void put_in_tile(const Params& p, const Eight& all, i64 row, i64 block, int quarter) {
    unsigned char* to = p.ready + (row / 8 / NT * p.blocks + block) * X_BYTES;
    int eight = row / 8 % NT;
    put_words(all, block, quarter, eight / TWO * 32 + row % 8 * 4, eight % TWO, to);
    if (quarter == 0) ((float*)(to + NT * 256))[(row % 8 / 2 * NT + eight) * 2 + row % 2] = of_products(all.scale);
}
#elif TILE == 2
// For teams, pieces of COLUMNS blocks of NT eights of rows: of each block and eight two matrices of 8 rows by 16 bytes, of the
// first words that lanes multiply and of the second ones. Behind all blocks the scales are as many halves of a row as one
// multiplication takes: those of first blocks of pairs in one matrix and of second ones in the other, each behind a zero.
__device__ __forceinline__ void put_in_tile(const Params& p, const Eight& all, i64 row, i64 block, int quarter) {
    unsigned char* piece = p.ready + (row / 8 / NT * (p.blocks / COLUMNS) + block / COLUMNS) * X_PIECE;
    int place = row / 8 % NT * 256 + row % 8 * 16, number = block % COLUMNS;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Spot spot = spot_of(block, quarter * 4 + i);
        unsigned char* to = piece + number * X_BLOCK + place + spot.word * 128 + spot.lane * 4 + spot.half * 2;
        *(unsigned short*)to = (unsigned short)(all.words[i / 2] >> 16 * (i % 2));
    }
    f16 scale;
    narrow(all.scale, scale);
    if (quarter == 0)
        *(unsigned*)(piece + COLUMNS * X_BLOCK + place + number % 2 * 128 + number / 2 * 4) = (unsigned)scale.bits << 16;
}
#endif

// Blocks of a row that a block of threads has.
constexpr int SHARE = 64;

extern "C" __global__ void __launch_bounds__(4 * SHARE) blocks_rows(Params p) {
    // The products may begin to fetch weights. Before, others may still read what is written here.
    let_others_begin();
    unsigned shares = (unsigned)((p.blocks + SHARE - 1) / SHARE);
    i64 row = blockIdx.x / shares, block = blockIdx.x % shares * (i64)SHARE + threadIdx.x / 4;
    int quarter = threadIdx.x % 4;
    const STORAGE* from = p.x + (row * p.given + block) * 32 + quarter * 8;
    wait_for_others();
    // Threads past the last block go along, as lanes exchange.
    float x[8] = {};
    if (row < p.rows && block < p.given) eight(from, x);
#if TILE
    Eight all = quantized(x);
    if (block < p.blocks) put_in_tile(p, all, row, block, quarter);
#else
    i64 chunks = (p.blocks + 31) / 32;
    unsigned char* to = block < p.blocks ? p.ready + (row * chunks + block / 32) * READY : nullptr;
    make_ready(x, to, block % 32, quarter, p.offset);
#endif
}
