/* Included before every file of llama.cpp when it is built by gcc 12: that compiler's _tile_loadconfig declares that it
 * reads 8 of the 64 bytes, so that the stores to the others are dropped, the tiles stay unconfigured, and the first
 * product of int8 tiles dies with an illegal instruction. */
#pragma once
#if defined(__AMX_TILE__)
#include <immintrin.h>
static inline void load_tile_config(const void *config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(*(const char (*)[64])config));
}
#undef _tile_loadconfig
#define _tile_loadconfig load_tile_config
#endif
