// Sine and cosine of an angle of arbitrarily many turns, which f32 could not hold precisely enough.

__device__ __forceinline__ void sine_and_cosine(double angle, double& sine, double& cosine) {
    sincos(angle, &sine, &cosine);
}

// The argument is reduced in f64 to a remainder of quarter turns that f32 holds. The polynomials are those of Cephes
// for an eighth of a turn to either side, within 1e-7.
__device__ __forceinline__ void sine_and_cosine(double angle, float& sine, float& cosine) {
    if (fabs(angle) > 1e9) {
        double s, c;
        sincos(angle, &s, &c);
        sine = (float)s, cosine = (float)c;
        return;
    }
    // Adding this rounds a number to an integer, which is then in the low bits of the sum.
    constexpr double WHOLE = 6755399441055744.0, QUARTERS = 0.63661977236758134308;
    double sum = fma(angle, QUARTERS, WHOLE), quarters = sum - WHOLE;
    int quarter = __double2loint(sum);
    float r = (float)fma(-quarters, 6.123233995736766e-17, fma(-quarters, 1.5707963267948966, angle)), z = r * r;
    float s = fmaf(z, fmaf(z, fmaf(z, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f) * r, r);
    float c = fmaf(z, fmaf(z, fmaf(z, fmaf(z, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f), -0.5f), 1.0f);
    sine = quarter & 1 ? c : s;
    cosine = quarter & 1 ? s : c;
    if (quarter & 2) sine = -sine;
    if (quarter + 1 & 2) cosine = -cosine;
}
