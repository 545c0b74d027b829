// Rows of x made ready for products that do not do it themselves. TILE: for tiles of 8 NT rows, else for walks.

struct Params {
    const STORAGE* x;
    unsigned char* ready;
    i64 rows, padded, blocks;
    int offset;  // by how much weights are too large
};

// The bits of a float whose last bit is worth 1, so that they and an integer make the bits of their sum.
constexpr int START = 0x4b400000;

// For tiles, NT eights of rows have a block together: the words of each eight in the order of the lanes that multiply them,
// and behind all of these for each row its scale, and what its sums start from, or where that is the same for all, what
// takes it away again.
__device__ __forceinline__ void put_in_tile(const Params& p, const Eight& all, i64 row, i64 block, int quarter) {
    unsigned char* to = p.ready + (row / 8 / NT * p.blocks + block) * NT * 320;
    int eight = row / 8 % NT, lane = row % 8 * 4 + quarter % 2 * 2;
    unsigned* words = (unsigned*)to + (eight * 32 + lane) * 2 + quarter / 2;
    words[0] = all.words[0];
    words[2] = all.words[1];
    int start = p.offset ? START - p.offset * all.sum : __float_as_int(-__int_as_float(START) * all.scale);
    if (quarter == 0) ((int2*)(to + NT * 256))[eight * 8 + row % 8] = {__float_as_int(all.scale), start};
}

extern "C" __global__ void blocks_rows(Params p) {
    // The products may begin to fetch weights.
    let_others_begin();
    i64 thread = blockIdx.x * (i64)blockDim.x + threadIdx.x, row = thread / 4 / p.blocks, block = thread / 4 % p.blocks;
    int quarter = threadIdx.x % 4;
    // Threads past the last row go along, as lanes exchange.
    float x[8] = {};
    if (row < p.rows) eight(p.x + (row * p.blocks + block) * 32 + quarter * 8, x);
#if TILE
    Eight all = quantized(x);
    if (row < p.padded) put_in_tile(p, all, row, block, quarter);
#else
    i64 chunks = (p.blocks + 31) / 32;
    unsigned char* to = row < p.padded ? p.ready + (row * chunks + block / 32) * READY : nullptr;
    make_ready(x, to, block % 32, quarter, p.offset);
#endif
}
