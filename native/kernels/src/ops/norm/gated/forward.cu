// A part of a row is read once if it fits in registers.

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, RESIDENT) gated_rms_norm(Params p) {
    i64 at = first_row(p), step = (i64)gridDim.x * ROWS;
    Weights of(p);
    int set = 0;
    for (i64 first = (i64)blockIdx.x * ROWS; first < p.rows; first += step, at += step, set ^= 1) {
        Row x, z;
        x.begin(p, p.x, at);
        z.begin(p, p.z, at);
        Inner u(p, x, z);
        Statistics s = statistics(p, u, set);
        EACH_PACK {
            REAL y[VEC], gate[VEC];
            u.units(p, s, k, y);
            z.values(p, k, gate);
            of.again(p, k);
            EACH_ELEMENT {
                y[e] *= of.w[WEIGHTS_AT][e];
                if (NORM_FIRST) y[e] *= activate<SILU>(gate[e]);
            }
            write(p, y, p.to, at, k);
        }
    }
}
