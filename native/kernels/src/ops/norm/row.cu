// A pack's bytes as words. From 16-bit elements the compiler would split words right after the load, and so wait for
// it.
template <int BYTES> struct alignas(BYTES) Words { unsigned of[BYTES / 4]; };
template <> struct alignas(2) Words<2> { unsigned short of[1]; };
typedef Words<sizeof(Pack)> PackWords;

// A row of a tensor; zeros past its end and past the last row.
struct Row {
    const STORAGE* from;
    bool there;
    PackWords held[HELD];

    __device__ __forceinline__ void begin(const Params& p, const STORAGE* tensor, i64 row) {
        there = row < p.rows;
        from = tensor + row * p.columns;
        if (PACKS)
            EACH_PACK held[AT] = read(p, k);
    }
    __device__ __forceinline__ PackWords read(const Params& p, int k) const {
        PackWords words = {};
        if (there && inside(p, k)) words = *(const PackWords*)(from + column(k));
        return words;
    }
    __device__ __forceinline__ void values(const Params& p, int k, REAL (&to)[VEC]) const {
        PackWords words = PACKS ? held[AT] : read(p, k);
        widen(*(const Pack*)&words, to);
    }
};
