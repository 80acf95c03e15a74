// RUN: secc opt %s -p 'normalize-loss,dce' --split-input-file | filecheck %s

// Rows of images go to the places of a mask. That each sample has as many places as rows is stated, without the entries by which
// the mask is expanded. An embedding that is the same for all samples may have any number of places.

sec.graph "placed" optional ["images"] {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.symbol "n" kind "rows" key "images" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "images" when ["images"] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %images = sec.input "images" : !sec.tensor<[n, 8], f32>
    %h = sec.call "net" (%ids) args "$0" outs [""] : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK: [[MASK:%[a-z0-9_]+]] = sec.glue "aten.eq.Scalar"
    %mask = sec.glue "aten.eq.Scalar" (%ids) args "$0, 1" at "model.py:2" : !sec.tensor<[B, S], bool>
    %m = sec.glue "aten.unsqueeze.default" (%mask) args "$0, -1" : !sec.tensor<[B, S, 1], bool>
    %e = sec.glue "aten.expand.default" (%m) args "$0, [B, S, 8]" : !sec.tensor<[B, S, 8], bool>
    %p = sec.glue "aten.masked_scatter.default" (%h, %e, %images) args "$0, $1, $2" at "model.py:3" : !sec.tensor<[B, S, 8], f32, grad>
    %token = sec.param "token" : !sec.tensor<[8], f32, grad>
    %tokens = sec.glue "aten.expand.default" (%token) args "$0, [B, S, 8]" : !sec.tensor<[B, S, 8], f32, grad>
    %other = sec.glue "aten.eq.Scalar" (%ids) args "$0, 2" : !sec.tensor<[B, S], bool>
    %o = sec.glue "aten.unsqueeze.default" (%other) args "$0, -1" : !sec.tensor<[B, S, 1], bool>
    %q = sec.glue "aten.masked_scatter.default" (%p, %o, %tokens) args "$0, $1, $2" at "model.py:4" : !sec.tensor<[B, S, 8], f32, grad>
    %loss = sec.glue "aten.sum.default" (%q) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: [[PLACES:%[a-z0-9_]+]] = sec.glue "aten.sum.default" ([[MASK]]) args "$0" at "model.py:3"
    // CHECK: sec.placed_rows "aten.masked_scatter.default" ([[PLACES]]) rows "n" at "model.py:3"
    // CHECK-NOT: sec.placed_rows
  }
}

// -----

// Captures need not show how many rows a mask selects: it was true everywhere in them. What it selects is counted.

sec.graph "selected" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.symbol "n" kind "rows" key "sounds" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "sounds" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %sounds = sec.input "sounds" : !sec.tensor<[n, 4, 8], f32>
    %valid = sec.input "valid" : !sec.tensor<[n, 4], bool>
    %h = sec.call "net" (%ids) args "$0" outs [""] : !sec.tensor<[B, S, 8], f32, grad>
    %rows = sec.glue "aten.index.Tensor" (%sounds, %valid) args "$0, [$1]" at "model.py:1" : !sec.tensor<["4*n", 8], f32>
    // CHECK: [[MASK:%[a-z0-9_]+]] = sec.glue "aten.eq.Scalar"
    %mask = sec.glue "aten.eq.Scalar" (%ids) args "$0, 1" at "model.py:2" : !sec.tensor<[B, S], bool>
    %m = sec.glue "aten.unsqueeze.default" (%mask) args "$0, -1" : !sec.tensor<[B, S, 1], bool>
    %p = sec.glue "aten.masked_scatter.default" (%h, %m, %rows) args "$0, $1, $2" at "model.py:3" : !sec.tensor<[B, S, 8], f32, grad>
    %loss = sec.glue "aten.sum.default" (%p) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK-DAG: [[PLACES:%[a-z0-9_]+]] = sec.glue "aten.sum.default" ([[MASK]]) args "$0" at "model.py:3"
    // CHECK-DAG: [[ROWS:%[a-z0-9_]+]] = sec.glue "aten.sum.default" (%valid) args "$0" at "model.py:3"
    // CHECK: sec.placed_rows "aten.masked_scatter.default" ([[PLACES]], [[ROWS]]) rows "1" at "model.py:3"
  }
}
