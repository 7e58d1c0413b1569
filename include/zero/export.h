// ZERO_API marks what the shared library shows.
#pragma once

#if defined(ZERO_STATIC)
#define ZERO_API
#else
#define ZERO_API __attribute__((visibility("default")))
#endif
