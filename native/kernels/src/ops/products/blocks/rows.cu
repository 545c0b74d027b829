// Prepares rows of x for products that do not do so themselves; each thread has parts of TURNS blocks. ORDER is
// TILES for tiles of 8 NT rows and weights of FORMAT, TEAMS for those of teams of warps, and WALKS for walks, whose x
// has READY bytes for 32 blocks of a row.

#define WALKS 0
#define TILES 1
#define TEAMS 2

#if ORDER == TILES
// For tiles, NT eights of rows store a block together. Two eights have their words side by side, in the order of the
// lanes that multiply them. After all words come the scales, two rows of each eight side by side.
__device__ __forceinline__ void put_in_tile(const Rows& p, const Eight& all, i64 row, i64 block, int quarter) {
    unsigned char* to = p.ready + (row / 8 / NT * p.blocks + block) * X_BYTES;
    int eight = row / 8 % NT;
    put_words(all, block, quarter, eight / TWO * 32 + row % 8 * 4, eight % TWO, to);
    if (quarter == 0) ((float*)(to + NT * 256))[(row % 8 / 2 * NT + eight) * 2 + row % 2] = of_products(all.scale);
}
#elif ORDER == TEAMS
// For teams: pieces of COLUMNS blocks of NT eights of rows. Each block and eight has two matrices of 8 rows by 16
// bytes: of the first words that lanes multiply, and of the second ones. After all blocks come matrices of halves, one
// per pair of blocks, with the scales in the columns of their blocks, among zeros.
__device__ __forceinline__ void put_in_tile(const Rows& p, const Eight& all, i64 row, i64 block, int quarter) {
    unsigned char* piece = p.ready + (row / 8 / NT * (p.blocks / COLUMNS) + block / COLUMNS) * X_PIECE;
    unsigned char* to = piece + row / 8 % NT * 256 + row % 8 * 16;
    int number = block % COLUMNS;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Spot spot = spot_of_pair(block, quarter * 4 + i);
        *(unsigned short*)(to + number * X_BLOCK + spot.word * 128 + spot.lane * 4 + spot.half * 2) =
            (unsigned short)(all.words[i / 2] >> 16 * (i % 2));
    }
    f16 scale;
    narrow(all.scale, scale);
    *(unsigned short*)(to + x_scales(number / 2) + (quarter * 2 + number % 2) * 2) = quarter == number / 2 ? scale.bits : 0;
}
#endif

// A block of threads has SHARE blocks of a row, and handles STEP of them at a time.
constexpr int STEP = SHARE / TURNS;

__device__ __forceinline__ void put(const Rows& p, const float (&x)[8], i64 row, i64 block, int quarter) {
#if ORDER != WALKS
    Eight all = quantized(x);
    if (block < p.blocks) put_in_tile(p, all, row, block, quarter);
#else
    i64 chunks = (p.blocks + 31) / 32;
    unsigned char* to = block < p.blocks ? p.ready + (row * chunks + block / 32) * READY : nullptr;
    make_ready(x, to, block % 32, quarter, p.offset);
#endif
}

// Limited to 32 registers per thread, so that these threads and those of a product fit on a multiprocessor.
extern "C" __global__ void __launch_bounds__(4 * STEP, 512 / STEP) blocks_rows(Rows p) {
    // The products may begin to fetch weights. Earlier kernels may still read the memory that this one writes.
    let_others_begin();
    unsigned shares = (unsigned)((p.blocks + SHARE - 1) / SHARE);
    i64 row = blockIdx.x / shares, block = blockIdx.x % shares * (i64)SHARE + threadIdx.x / 4;
    int quarter = threadIdx.x % 4;
    const STORAGE* from = p.x + (row * p.given + block) * 32 + quarter * 8;
    wait_for_others();
    // Threads past the last block run along, because lanes exchange values.
    float x[TURNS][8] = {};
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
        if (row < p.rows && block + i * STEP < p.given) eight(from + i * STEP * 32, x[i]);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) put(p, x[i], row, block + i * STEP, quarter);
}
