// RUN: secc opt %s -p coarsen | filecheck %s

// Glue that reads parameters and is used in two sections: a lookup with rows per sample is computed in the first and sent on; position
// embeddings have no rows, so each section computes its own.

sec.graph "pair" widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "encoder" class "E" params 50 trainable 50 component "encoder" layers 2 when []
  sec.block "decoder" class "D" params 60 trainable 60 component "decoder" layers 2 when []
  sec.case "all" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %w = sec.param "embed" : !sec.tensor<[99, 8], f32, grad>
    %q = sec.param "positions" : !sec.tensor<[512, 8], f32, grad>
    // CHECK: sec.glue "aten.embedding.default" {{.*}} in @encoder
    %x = sec.glue "aten.embedding.default" (%w, %ids) args "$0, $1" : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK: sec.glue "aten.slice.Tensor" {{.*}} in @encoder
    // CHECK-NEXT: sec.glue "aten.slice.Tensor" {{.*}} in @decoder
    %p = sec.glue "aten.slice.Tensor" (%q) args "$0, 0, 0, S" : !sec.tensor<[S, 8], f32, grad>
    %e = sec.call "encoder" (%x, %p) args "$0, $1" outs [""] {mode = "train"} : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK: sec.glue "aten.add.Tensor" {{.*}} in @decoder
    %y = sec.glue "aten.add.Tensor" (%x, %p) args "$0, $1" : !sec.tensor<[B, S, 8], f32, grad>
    %h = sec.call "decoder" (%e, %y) args "$0, $1" outs [""] {mode = "train"} : !sec.tensor<[B, S, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
}
