// Sinusoids of positions, computed where they are added: no table, so no longest sequence.
#pragma once
#include "common.cuh"

// Adds the sinusoids of place `position` (counted from 0; the first has angle 1) to channels `channel` and following:
// sine of even, cosine of odd ones, of a period of 2 pi 10000^(even channel / channels). The sinusoid is rounded to T
// before it is added, as a table of that type would be.
template <typename T, int WIDTH>
__device__ inline void add_positions(float (&values)[WIDTH], int position, int channel, int channels) {
    const float step = -9.210340371976184f / static_cast<float>(channels);  // -log 10000
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        const int even = (channel + i) / 2 * 2;
        const float angle = static_cast<float>(position + 1) * expf(static_cast<float>(even) * step);
        const float wave = (channel + i) % 2 ? cosf(angle) : sinf(angle);
        values[i] += to_float(from_float<T>(wave));
    }
}
