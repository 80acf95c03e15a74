// RUN: secc opt %s -p coarsen | filecheck %s

// Blocks without a stack of layers join the neighbour of equal predicate and mode: the projector the vision tower, the head the
// language model. An embedding lookup in glue goes where it is used, glue on a block's result where its rows can be sent on, and glue on
// inputs alone nowhere.

sec.graph "vlm" optional ["px"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.block "model.vision" class "V" params 300 trainable 300 component "model.vision" layers 2 when ["px"]
  sec.block "model.projector" class "P" params 20 trainable 20 component "model.projector" layers 0 when ["px"]
  sec.block "model.lm" class "L" params 900 trainable 900 component "model.lm" layers 4 when []
  sec.block "head" class "H" params 90 trainable 90 component "head" layers 0 when []
  // CHECK: sec.section "vision" mode "train" when ["px"] blocks ["model.vision", "model.projector"]
  // CHECK-NEXT: sec.section "lm" mode "train" when [] blocks ["model.lm", "head"]
  // CHECK-NEXT: sec.case
  sec.case "image" when ["px"] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %px = sec.input "px" : !sec.tensor<[n, 3, 8, 8], f32>
    %w = sec.param "model.embed.weight" : !sec.tensor<[99, 16], f32, grad>
    // CHECK: sec.glue "aten.embedding.default" {{.*}} in @lm
    %x = sec.glue "aten.embedding.default" (%w, %ids) args "$0, $1" : !sec.tensor<[B, S, 16], f32, grad>
    // CHECK: sec.call "model.vision" {{.*}} in @vision
    %f = sec.call "model.vision" (%px) args "$0" outs [""] {mode = "train"} : !sec.tensor<[n, 5, 8], f32, grad>
    // CHECK: sec.glue "aten.slice.Tensor" {{.*}} in @vision
    %g = sec.glue "aten.slice.Tensor" (%f) args "$0, 1, 1, 5" : !sec.tensor<[n, 4, 8], f32, grad>
    %p = sec.call "model.projector" (%g) args "$0" outs [""] {mode = "train"} : !sec.tensor<[n, 4, 16], f32, grad>
    // CHECK: sec.glue "aten.eq.Scalar" (%{{.*}}) args "$0, 98" :
    %m = sec.glue "aten.eq.Scalar" (%ids) args "$0, 98" : !sec.tensor<[B, S], bool>
    // CHECK: sec.glue "aten.masked_scatter.default" {{.*}} in @lm
    %s = sec.glue "aten.masked_scatter.default" (%x, %m, %p) args "$0, $1, $2" : !sec.tensor<[B, S, 16], f32, grad>
    %h = sec.call "model.lm" (%s) args "$0" outs [""] {mode = "train"} : !sec.tensor<[B, S, 16], f32, grad>
    %l = sec.call "head" (%h) args "$0" outs [""] {mode = "train"} : !sec.tensor<[B, S, 99], f32, grad>
    // CHECK: sec.glue "aten.sum.default" {{.*}} in @lm
    %n = sec.glue "aten.sum.default" (%l) args "$0" : !sec.tensor<[], f32, grad>
    // CHECK-NEXT: sec.term "loss" {{.*}} in @lm
    sec.term "loss" (%n)
    sec.return constant "0.0"
  }
}
