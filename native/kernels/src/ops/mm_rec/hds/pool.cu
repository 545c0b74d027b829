// One level of a hierarchy from the level below, one thread per element; the y index of a block is the bank.

extern "C" __global__ void hds_pool(Pool p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 column = id % p.width, row = id / p.width, j = row % p.slots, batch = row / p.slots;
    if (batch >= p.batch) return;
    bool second = blockIdx.y > 0;
    const FROM* from = (second ? p.from[1] : p.from[0]) + batch * p.below * p.width + column;
    Window window(j, p.below, p.slots);
    REAL sum = 0;
    for (i64 age = window.begin; age < window.end; ++age) {
        i64 r = age + p.first;
        sum += widen(from[(r < p.below ? r : r - p.below) * p.width]);
    }
    REAL mean = sum / (REAL)window.count();
    STORAGE* to = second ? p.to[1] : p.to[0];
    REAL* wide = second ? p.wide[1] : p.wide[0];
    if (to) narrow(mean, to[id]);
    if (wide) wide[id] = mean;
}
