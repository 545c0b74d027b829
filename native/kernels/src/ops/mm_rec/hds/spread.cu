// The cotangents of a level: the given ones, plus shares of those of the level above. One thread per element; the y
// index of a block is the bank.

extern "C" __global__ void hds_spread(Spread p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 column = id % p.width, row = id / p.width, j = row % p.slots, batch = row / p.slots;
    if (batch >= p.batch) return;
    bool second = blockIdx.y > 0;
    const STORAGE* given = second ? p.given[1] : p.given[0];
    REAL sum = given ? (REAL)widen(given[id]) : (REAL)0;
    if (p.of_above > 0) {
        Window of(j, p.of_above, p.slots);
        const REAL* above = (second ? p.above[1] : p.above[0]) + batch * p.of_above * p.width + column;
        for (i64 i = of.begin; i < of.end; ++i)
            sum += above[i * p.width] / (REAL)Window(i, p.slots, p.of_above).count();
    }
    i64 slot = j + p.first;
    if (slot >= p.slots) slot -= p.slots;
    TO* to = second ? p.to[1] : p.to[0];
    narrow(sum, to[(batch * p.slots + slot) * p.width + column]);
}
