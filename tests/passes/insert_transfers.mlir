// RUN: secc opt %s -p insert-transfers | filecheck %s

// An edge carries a value by rows per sample, cut to a sample's own width on the side that collate pads. It has one name in all cases: the
// text alone and the text with its image in it are one edge of the decoder. An edge only takes a gradient that reaches the loss: the features have one from
// the decoder, none from the teacher, which computes without gradients.

sec.graph "vlm" optional ["px"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.symbol "n" kind "rows" key "px" dim 0
  %k = sec.key "ids" pads ["1 left 0"] : !sec.tensor<[B, S], i64>
  sec.block "model.vision" class "V" params 300 trainable 300
  sec.block "model.embed" class "E" params 90 trainable 90
  sec.block "model.decoder" class "L" params 900 trainable 900
  sec.section "vision" mode "train" when ["px"] blocks ["model.vision"]
  sec.section "embed" mode "train" when [] blocks ["model.embed"]
  sec.block "model.teacher" class "T" params 900 trainable 0
  sec.section "teacher" mode "forward" when ["px"] blocks ["model.teacher"]
  sec.section "decoder" mode "train" when [] blocks ["model.decoder"]
  // CHECK: sec.case "text"
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %x = sec.call "model.embed" (%ids) args "$0" outs [""] in @embed : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK: %embed = sec.transfer "embed" (%{{.*}}) from @embed to @decoder dim 0 rows "B" extents [#sec.extent<1, "S", "left">] : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK-NEXT: sec.call "model.decoder" (%embed)
    %h = sec.call "model.decoder" (%x) args "$0" outs [""] in @decoder : !sec.tensor<[B, S, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @decoder : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @decoder
    sec.return constant "0.0"
  }
  // CHECK: sec.case "image"
  sec.case "image" when ["px"] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %px = sec.input "px" : !sec.tensor<[n, 64], f32>
    %f, %s = sec.call "model.vision" (%px) args "$0" outs [".features", ".scores"] in @vision : !sec.tensor<[n, 8], f32, grad>, !sec.tensor<["4*n"], f32, grad>
    // CHECK: sec.transfer "vision_features" (%{{.*}}) from @vision to @embed dim 0 rows "n" : !sec.tensor<[n, 8], f32, grad>
    // CHECK: sec.transfer "vision_features_to_teacher" (%{{.*}}) from @vision to @teacher dim 0 rows "n" : !sec.tensor<[n, 8], f32>
    // CHECK: sec.transfer "vision_scores" (%{{.*}}) from @vision to @decoder dim 0 rows "4*n" : !sec.tensor<["4*n"], f32>
    %x = sec.call "model.embed" (%ids) args "$0" outs [""] in @embed : !sec.tensor<[B, S, 8], f32, grad>
    %y = sec.glue "aten.masked_scatter.default" (%x, %ids, %f) args "$0, $1, $2" in @embed : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK: sec.transfer "embed" (%{{.*}}) from @embed to @decoder dim 0 rows "B" extents [#sec.extent<1, "S", "left">] : !sec.tensor<[B, S, 8], f32, grad>
    %t = sec.call "model.teacher" (%f) args "$0" outs [""] no_grad in @teacher : !sec.tensor<[n, 8], f32>
    %d = sec.glue "aten.detach.default" (%s) args "$0" in @decoder : !sec.tensor<["4*n"], f32>
    %h = sec.call "model.decoder" (%y, %d) args "$0, $1" outs [""] in @decoder : !sec.tensor<[B, S, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @decoder : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @decoder
    sec.return constant "0.0"
  }
}
