// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// The weight of a task counts once if any sample has the task's labels: 1/n for each of their n rows.

sec.graph "weighted" optional ["depth", "kind"] {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "n_depth" kind "rows" key "depth" dim 0
  sec.symbol "n_kind" kind "rows" key "kind" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  // CHECK: sec.case "kind"
  sec.case "kind" when ["kind"] {
    %y = sec.input "kind" : !sec.tensor<[n_kind, 8], f32>
    %k = sec.call "net" (%y) args "$0" outs [""] : !sec.tensor<[n_kind, 8], f32, grad>
    %w = sec.param "weights" : !sec.tensor<[2], f32, grad>
    %s = sec.glue "aten.select.int" (%w) args "$0, 0, 1" at "loss.py:5" : !sec.tensor<[], f32, grad>
    %m = sec.glue "aten.mean.default" (%k) args "$0" at "loss.py:4" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%m, %s) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: [[EACH:%[0-9]+]] = sec.glue "aten.mul.Tensor" ({{%[a-z0-9_]+}}) args "$0, n_kind"
    // CHECK: sec.term "[[KIND:constant[_0-9]*]]" ([[EACH]]
  }
  // CHECK: sec.case "both"
  sec.case "both" when ["depth", "kind"] {
    %x = sec.input "depth" : !sec.tensor<[n_depth, 8], f32>
    %y = sec.input "kind" : !sec.tensor<[n_kind, 8], f32>
    %d = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[n_depth, 8], f32, grad>
    %k = sec.call "net" (%y) args "$0" outs [""] : !sec.tensor<[n_kind, 8], f32, grad>
    %w = sec.param "weights" : !sec.tensor<[2], f32, grad>
    %r = sec.glue "aten.select.int" (%w) args "$0, 0, 0" at "loss.py:5" : !sec.tensor<[], f32, grad>
    %s = sec.glue "aten.select.int" (%w) args "$0, 0, 1" at "loss.py:5" : !sec.tensor<[], f32, grad>
    %l = sec.glue "aten.mean.default" (%d) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %m = sec.glue "aten.mean.default" (%k) args "$0" at "loss.py:4" : !sec.tensor<[], f32, grad>
    %a = sec.glue "aten.add.Tensor" (%l, %r) args "$0, $1" : !sec.tensor<[], f32, grad>
    %b = sec.glue "aten.add.Tensor" (%m, %s) args "$0, $1" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%a, %b) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: sec.term "constant_1"
    // CHECK: sec.term "[[KIND]]"
  }
  // CHECK: sec.case "depth"
  sec.case "depth" when ["depth"] {
    %x = sec.input "depth" : !sec.tensor<[n_depth, 8], f32>
    %d = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[n_depth, 8], f32, grad>
    %w = sec.param "weights" : !sec.tensor<[2], f32, grad>
    %r = sec.glue "aten.select.int" (%w) args "$0, 0, 0" at "loss.py:5" : !sec.tensor<[], f32, grad>
    %l = sec.glue "aten.mean.default" (%d) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%l, %r) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: sec.glue "aten.mul.Tensor" ({{%[a-z0-9_]+}}) args "$0, n_depth"
    // CHECK: sec.term "constant_1"
  }
}
