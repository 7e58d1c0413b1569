// Catch2's header, version 2 (Debian 12) or 3.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#define ZERO_TEST_CATCH3 1
using Catch::Approx;  // v2 has it here already by a using-directive of its own
#else
#include <catch2/catch.hpp>
#endif
