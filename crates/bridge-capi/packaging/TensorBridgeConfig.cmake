# find_package(TensorBridge): the target TensorBridge::tensor_bridge, for tensor_bridge.h and tensor_bridge.hpp.
get_filename_component(_tensor_bridge_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET TensorBridge::tensor_bridge)
  add_library(TensorBridge::tensor_bridge SHARED IMPORTED)
  set_target_properties(TensorBridge::tensor_bridge PROPERTIES
    IMPORTED_LOCATION "${_tensor_bridge_prefix}/lib/libtensor_bridge_c.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_tensor_bridge_prefix}/include"
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}")
endif()
unset(_tensor_bridge_prefix)
