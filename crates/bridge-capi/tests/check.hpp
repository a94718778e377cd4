// What the programs in C++ share: checks that end the program.
#ifndef CHECK_HPP
#define CHECK_HPP

#include "truebridge.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tb = truebridge;

#define EXPECT(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
      std::exit(1);                                                               \
    }                                                                             \
  } while (0)

template <class Body>
static std::string thrown(tb_status kind, Body body) {
  try {
    body();
  } catch (const tb::error &error) {
    if (error.kind() != kind) std::fprintf(stderr, "%s: %s\n", error.name(), error.what());
    EXPECT(error.kind() == kind && std::strcmp(error.name(), tb_status_name(kind)) == 0);
    return error.what();
  }
  EXPECT(!"an error");
  return "";
}

#endif  // CHECK_HPP
