// Copies rows of heads, one thread per element.

extern "C" __global__ void copy_rows(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 column = id % p.sizes[3], row = id / p.sizes[3];
    i64 i = row % p.sizes[2], of = row / p.sizes[2], head = of % p.sizes[1], batch = of / p.sizes[1];
    if (batch >= p.sizes[0]) return;
    p.to[batch * p.to_at[0] + head * p.to_at[1] + (p.first + i) * p.to_at[2] + column] =
        p.from[batch * p.from_at[0] + head * p.from_at[1] + i * p.from_at[2] + column];
}
