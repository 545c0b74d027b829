// dg with BY_KEY, from its values after each chunk, the sums of p.products, and the suffix sums of p.changes within the
// chunk. A thread for each key of a chunk of a head.

extern "C" __global__ void matrix_state_key_gates(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 all = (i64)p.batch * p.heads * p.chunks * p.keys;
    if (id >= all) return;
    i64 key = id % p.keys, chunk = id / p.keys % p.chunks, head = id / p.keys / p.chunks;
    REAL sum = 0;
    for (int i = 0; i < p.slices; i++) sum += p.products[i * all + id];
    i64 first = chunk * CHUNK, left = p.length - first;
    for (i64 t = first + (left < CHUNK ? left : CHUNK) - 1; t >= first; t--) {
        i64 place = ((head / p.heads * p.length + t) * p.heads + head % p.heads) * p.keys + key;
        sum += p.changes[place];
        p.dg[place] = sum;
    }
}
