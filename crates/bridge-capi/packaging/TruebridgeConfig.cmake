# find_package(Truebridge): the target Truebridge::truebridge, for truebridge.h and truebridge.hpp.
get_filename_component(_truebridge_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET Truebridge::truebridge)
  add_library(Truebridge::truebridge SHARED IMPORTED)
  set_target_properties(Truebridge::truebridge PROPERTIES
    IMPORTED_LOCATION "${_truebridge_prefix}/lib/libtruebridge_c.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_truebridge_prefix}/include"
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}")
endif()
unset(_truebridge_prefix)
