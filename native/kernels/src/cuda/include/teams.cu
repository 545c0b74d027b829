// Teams of four warps (warpgroups) that multiply as one, each for SIDE outputs and 8 NT rows of x. SIDES teams stand
// side by side, and DEEP such rows of teams take pieces of columns in turn. The host gives SIDE, NT, SIDES and DEEP.

constexpr int OUTPUTS = SIDE * SIDES, WARPS = 4 * SIDES * DEEP, THREADS = 32 * WARPS, ROWS = 8 * NT;

// The index of a warp's team among the DEEP that take turns, and the warp's first output.
struct Team {
    int deep, output;

    __device__ __forceinline__ Team() {
        int warp = threadIdx.x / 32, team = warp / 4;
        deep = team / SIDES, output = team % SIDES * SIDE + warp % 4 * 16;
    }
};

// Visits the stages whose pieces are this team's turn. A stage always belongs to the same teams, so that each team can
// track its phases.
template <class F>
__device__ __forceinline__ void take_turns(const Place& at, Stages& stages, const Team& own, Turn turn, F add) {
    static_assert(STAGES % DEEP == 0, "turns");
    int first = (own.deep + DEEP - turn.stage % DEEP) % DEEP;
    turn.skip(first);
    for (int i = first; i < at.count; i += DEEP, turn.skip(DEEP)) {
        wait(&stages.full[turn.stage], turn.parity);
        add(turn.stage);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&stages.free[turn.stage]);
    }
}

// Rows of sums are padded so that lanes write to different banks.
constexpr int SUMS_PITCH = OUTPUTS + 4, SUMS = ROWS * SUMS_PITCH;

// Writes a warp's sums to `all` after applying `made` to each, or adds them to its contents.
template <bool ADDED, class T, class F>
__device__ __forceinline__ void leave(const T (&sums)[NT][4], const Team& own, T* all, F made) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    T* to = all + 2 * t * SUMS_PITCH + own.output + g;
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) {
        T& sum = to[(i / 4 * 8 + i % 2) * SUMS_PITCH + i % 4 / 2 * 8];
        sum = made(sums[i / 4][i % 4]) + (ADDED ? sum : 0);
    }
}

// Like `leave`, for all teams: there is space for ROOM partial sums, and further teams add to them in turn.
template <int ROOM, class T, class F>
__device__ __forceinline__ void leave_all(const T (&sums)[NT][4], const Team& own, T* all, F made) {
    T* to = all + own.deep % ROOM * SUMS;
    if (own.deep < ROOM) leave<false>(sums, own, to, made);
#pragma unroll
    for (int begin = ROOM; begin < DEEP; begin += ROOM) {
        meet_first<THREADS>();
        if (begin <= own.deep && own.deep < begin + ROOM) leave<true>(sums, own, to, made);
    }
    meet_all<THREADS>();
}

// Four adjacent sums, added over all SPLIT parts and their ROOM partial sums.
template <int ROOM, class Four>
__device__ __forceinline__ Four added(const Four* fours) {
    Four sum = {};
#pragma unroll
    for (int part = 0; part < SPLIT; part++)
#pragma unroll
        for (int i = 0; i < ROOM; i++) {
            Four other = of_part(fours + i * (SUMS / 4), part);
            sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
        }
    return sum;
}
