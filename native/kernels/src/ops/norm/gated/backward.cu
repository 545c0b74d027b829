// A slot of threads accumulates its columns' sums for dw in registers (in its row of p.dw if PACKS is 0); norm_sums
// adds up those of all slots. x, z and dy are held in storage precision, which takes half the registers for 16-bit
// types.

// The cotangent of w u^ for a pack.
__device__ __forceinline__ void of_norm(const Params& p, const Row& dy, const Row& z, int k, REAL (&to)[VEC]) {
    dy.values(p, k, to);
    if (!NORM_FIRST) return;
    REAL gate[VEC];
    z.values(p, k, gate);
    EACH_ELEMENT to[e] *= activate<SILU>(gate[e]);
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, RESIDENT) gated_rms_norm_backward(Params p) {
    i64 own = first_row(p), step = (i64)gridDim.x * ROWS, at = own;
    Weights of(p);
    REAL* sums = p.dw + own * p.columns;
    REAL dw[HELD][VEC] = {};
    int set = 0;
    for (i64 first = (i64)blockIdx.x * ROWS; first < p.rows; first += step, at += step, set ^= 1) {
        Row x, z, dy;
        x.begin(p, p.x, at);
        z.begin(p, p.z, at);
        dy.begin(p, p.dy, at);
        Inner u(p, x, z);
        Statistics s = statistics(p, u, set);
        REAL parts[PARTS] = {};
        EACH_PACK {
            REAL unit[VEC], cotangent[VEC];
            u.units(p, s, k, unit);
            of_norm(p, dy, z, k, cotangent);
            of.again(p, k);
#if PACKS == 0
            // Only this thread writes these columns of its row of sums, which must be initialised before the first row.
            EACH_ELEMENT dw[0][e] = 0;
            if (at != own) read(p, sums, k, dw[0]);
#endif
            EACH_ELEMENT {
                REAL product = cotangent[e] * unit[e];
                parts[e % PARTS] += of.w[WEIGHTS_AT][e] * product;
                // Past the last row u and the cotangent are 0, but 0 times an infinite r would be NaN.
                dw[AT][e] += ROWS == 1 || x.there ? product : 0;
            }
#if PACKS == 0
            write(p, dw[0], sums, k);
#endif
        }
        REAL along[1] = {total(parts)};
        row_sums<2>(along, set);
        REAL mean = along[0] * p.inverse_count;
        EACH_PACK {
            REAL unit[VEC], cotangent[VEC], gate[VEC], values[VEC], dx[VEC], dz[VEC];
            u.units(p, s, k, unit);
            of_norm(p, dy, z, k, cotangent);
            z.values(p, k, gate);
            (NORM_FIRST ? dy : x).values(p, k, values);
            of.again(p, k);
            EACH_ELEMENT {
                REAL w = of.w[WEIGHTS_AT][e], du = s.r * (w * cotangent[e] - unit[e] * mean);
                dx[e] = NORM_FIRST ? du : du * activate<SILU>(gate[e]);
                dz[e] = (NORM_FIRST ? w * unit[e] : du) * values[e] * slope<SILU>(gate[e]);
            }
            write(p, dx, p.to, at, k);
            write(p, dz, p.dz, at, k);
        }
    }
#if PACKS
    EACH_PACK write(p, dw[AT], sums, k);
#else
    // The number of slots is a multiple of the groups, so some slots may not have had a row.
    if (own >= p.rows)
        EACH_PACK write(p, dw[0], sums, k);
#endif
}
