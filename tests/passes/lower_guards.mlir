// RUN: secc opt %s -p lower | filecheck %s

// A guard stays where it decides: both outcomes of the first were captured and change the decoder alone. The second was seen with one
// outcome and may change what comes after it, which is nothing in the encoder.

sec.graph "masked" widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "encoder" class "E" params 30 trainable 30
  sec.block "decoder" class "D" params 90 trainable 90
  sec.section "encoder" mode "train" when [] blocks ["encoder"]
  sec.section "decoder" mode "train" when [] blocks ["decoder"]
  // CHECK: sec.body "always" in @encoder when [] {
  // CHECK-NEXT: sec.input
  // CHECK-NEXT: sec.call "encoder"
  // CHECK-NEXT: sec.send
  // CHECK-NEXT: }
  // CHECK-NEXT: sec.body "always" in @decoder when [] {
  // CHECK:      sec.guard (%{{.*}}) equals "True" at "m.py:1"
  // CHECK:      sec.guard (%{{.*}}) equals "False" at "m.py:3"
  // CHECK:      sec.call "decoder" (%{{[^,]*}}) args "$0, None"
  // CHECK:      sec.body "always_2" in @decoder when [] {
  // CHECK:      sec.guard (%{{.*}}) equals "False" at "m.py:1"
  // CHECK:      sec.guard (%{{.*}}) equals "False" at "m.py:3"
  // CHECK:      sec.call "decoder" (%{{.*}}, %{{.*}}) args "$0, $1"
  sec.case "full" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %m = sec.glue "aten.ne.Scalar" (%ids) args "$0, 0" : !sec.tensor<[B, S], bool>
    %g = sec.glue "aten.all.default" (%m) args "$0" : !sec.tensor<[], bool>
    sec.guard (%g) equals "True" at "m.py:1"
    %e = sec.call "encoder" (%ids) args "$0" outs [""] in @encoder at "m.py:2" : !sec.tensor<[B, S, 8], f32, grad>
    %t = sec.transfer "encoder" (%e) from @encoder to @decoder dim 0 rows "B" extents [#sec.extent<1, "S", "right">] : !sec.tensor<[B, S, 8], f32, grad>
    %x = sec.glue "aten.max.default" (%ids) args "$0" : !sec.tensor<[], i64>
    %y = sec.glue "aten.gt.Scalar" (%x) args "$0, 90" : !sec.tensor<[], bool>
    sec.guard (%y) equals "False" at "m.py:3"
    %d = sec.call "decoder" (%t) args "$0, None" outs [""] in @decoder at "m.py:4" : !sec.tensor<[B, S, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%d) args "$0" in @decoder : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @decoder
    sec.return constant "0.0"
  }
  sec.case "padded" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %m = sec.glue "aten.ne.Scalar" (%ids) args "$0, 0" : !sec.tensor<[B, S], bool>
    %g = sec.glue "aten.all.default" (%m) args "$0" : !sec.tensor<[], bool>
    sec.guard (%g) equals "False" at "m.py:1"
    %e = sec.call "encoder" (%ids) args "$0" outs [""] in @encoder at "m.py:2" : !sec.tensor<[B, S, 8], f32, grad>
    %t = sec.transfer "encoder" (%e) from @encoder to @decoder dim 0 rows "B" extents [#sec.extent<1, "S", "right">] : !sec.tensor<[B, S, 8], f32, grad>
    %x = sec.glue "aten.max.default" (%ids) args "$0" : !sec.tensor<[], i64>
    %y = sec.glue "aten.gt.Scalar" (%x) args "$0, 90" : !sec.tensor<[], bool>
    sec.guard (%y) equals "False" at "m.py:3"
    %d = sec.call "decoder" (%t, %m) args "$0, $1" outs [""] in @decoder at "m.py:4" : !sec.tensor<[B, S, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%d) args "$0" in @decoder : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @decoder
    sec.return constant "0.0"
  }
}
