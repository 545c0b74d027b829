// Writes into the slots of a bank, one thread per element: rows into adjacent slots of a ring, or a summary into one
// slot or all slots.

#ifdef SHORT

extern "C" __global__ void write_short(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x, stay = p.count - p.first;
    i64 column = id % p.width, row = id / p.width, i = row % stay, batch = row / stay;
    if (batch >= p.batch) return;
    i64 slot = (p.slot + i) % p.slots;
    p.bank[(batch * p.slots + slot) * p.width + column] = p.rows[(batch * p.count + p.first + i) * p.width + column];
}

#else

extern "C" __global__ void write_long(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 column = id % p.width, row = id / p.width, slot = p.first + row % p.count, batch = row / p.count;
    if (batch >= p.batch) return;
    const STORAGE& summary = p.summary[batch * p.width + column];
    STORAGE& to = p.bank[(batch * p.slots + slot) * p.width + column];
    if (p.decay == 0)
        to = summary;
    else
        narrow(fma((REAL)p.decay, (REAL)widen(to), (REAL)(1 - p.decay) * widen(summary)), to);
}

#endif
